"""Config: every value is validated, and the environment gives defaults."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from ucudnn.config import SETTINGS, Config, read_environment, require_config
from ucudnn.errors import ConfigError, UcudnnWarning, quoted


@pytest.mark.parametrize(
    ("limit", "count"), [(0, 0), (1 << 20, 1 << 20), ("64MiB", 64 << 20), (None, None)]
)
def test_the_limit_is_read_as_bytes(limit: int | str | None, count: int | None) -> None:
    assert Config(workspace_limit=limit).limit_bytes == count


def test_ops_are_kept_in_one_order_so_that_equal_settings_are_equal() -> None:
    assert Config(ops=("wgrad", "fprop", "wgrad")) == Config(ops="fprop,wgrad")
    assert Config(ops=["dgrad"]).ops == ("dgrad",)


def test_a_budget_of_what_is_available_leaves_a_margin_of_it() -> None:
    config, gib = Config(memory_budget=" available "), 1 << 30
    assert config.memory_budget == "available"
    assert config.budget_bytes is None
    assert config.with_budget_of(5, 100 * gib, gib).budget_bytes == 96 * gib
    assert config.with_budget_of(5, gib).budget_bytes == gib - (64 << 20)
    assert config.with_budget_of(5, 1 << 20, 7).budget_bytes == 7
    with pytest.raises(ConfigError, match="not known here; give bytes or a share"):
        config.with_budget_of(5)
    assert Config(memory_budget=3).with_budget_of(5, gib).budget_bytes == 3
    assert Config.from_dict(config.to_dict()) == config


REFUSED: list[tuple[str, Any, str]] = [
    ("workspace_limit", "64MB", "workspace_limit must be a number of bytes"),
    ("workspace_limit", -1, "workspace_limit must be a number of bytes"),
    ("memory_budget", "all", "memory_budget must be .* 50%, or available$"),
    ("policy", "some", "policy must be one of undivided, powers-of-two, all, got 'some'"),
    ("layout", "nhwc", "layout must be one of keep, auto, got 'nhwc'"),
    ("unplanned", "ignore", "unplanned must be one of torch, error, got 'ignore'"),
    ("backend", "cudnn8", "backend must be one of auto, torch_cpu.*, got 'cudnn8'"),
    ("ops", "forward", "ops must name some of fprop, dgrad, wgrad, got 'forward'"),
    ("ops", (), r"ops must name some of fprop, dgrad, wgrad, got \(\)"),
    ("ops", [["fprop"]], "ops must name some of fprop, dgrad, wgrad, got"),
    ("device", 3, "device must be a device's name or a profile or None, got 3"),
    ("policy", "x" * 100_000, "policy must be one of .*, got 'xxx.* ... .*xxx'$"),
    ("workspace_limit", "9" * 100_000, "workspace_limit must be .*, got '999.* ... .*999'$"),
    ("time_budget_s", 10**100_000, "time_budget_s must be .*, got an int of 332193 bits$"),
    ("layout", np.array(["keep", "auto"]), r"layout must be one of .*, got array\("),
    ("ops", [np.array(["fprop"])], r"ops must name some of .*, got \[array\("),
    ("cache", 3, "cache must be a folder's path or None, got 3"),
    ("deterministic", 3, "deterministic must be True, False or None, got 3"),
    ("step_race", "yes", "step_race must be True or False, got 'yes'"),
    ("max_error", 0, "max_error must be a number above 0 or None, got 0"),
    ("max_error", float("inf"), "max_error must be a number above 0 or None, got inf"),
    ("time_budget_s", True, "time_budget_s must be a number above 0 or None, got True"),
    ("time_budget_s", 10**400, "time_budget_s must be a number above 0 or None, got 1000"),
    ("effort", "some", "effort must be one of quick, normal, thorough, got 'some'"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), REFUSED, ids=quoted)
def test_refuses_a_value_and_lists_those_allowed(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        Config(**{name: value})
    assert len(str(caught.value)) < 300


ENVIRONMENT = [
    ("UCUDNN_WORKSPACE_LIMIT", "8MiB", "workspace_limit", 8 << 20),
    ("UCUDNN_TOTAL_WORKSPACE", "1GiB", "total_workspace", 1 << 30),
    ("UCUDNN_MEMORY_BUDGET", "1KiB", "memory_budget", 1024),
    ("UCUDNN_LOOP", "1", "loop", True),
    ("UCUDNN_SOLVER", "cbc", "solver", "cbc"),
    ("UCUDNN_POLICY", "all", "policy", "all"),
    ("UCUDNN_OPS", "wgrad,fprop", "ops", ("fprop", "wgrad")),
    ("UCUDNN_UNPLANNED", "error", "unplanned", "error"),
    ("UCUDNN_DETERMINISTIC", "true", "deterministic", True),
    ("UCUDNN_CACHE", "some/folder", "cache", "some/folder"),
    ("UCUDNN_BACKEND", "torch_cpu", "backend", "torch_cpu"),
    ("UCUDNN_DEVICE", "H200", "device", "H200"),
    ("UCUDNN_MAX_ERROR", "1e-3", "max_error", 1e-3),
    ("UCUDNN_LAYOUT", "auto", "layout", "auto"),
    ("UCUDNN_COMPILE", "auto", "compile", "auto"),
    ("UCUDNN_COMPILE_BUDGET_S", "90", "compile_budget_s", 90.0),
    ("UCUDNN_EFFORT", "quick", "effort", "quick"),
    ("UCUDNN_TIME_BUDGET_S", "60", "time_budget_s", 60.0),
    ("UCUDNN_STEP_RACE", "0", "step_race", False),
]


@pytest.mark.parametrize(("variable", "text", "name", "value"), ENVIRONMENT)
def test_a_variable_gives_the_default_of_its_field(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, name: str, value: object
) -> None:
    monkeypatch.setenv(variable, text)
    assert getattr(Config(), name) == value


def test_every_setting_is_described() -> None:
    assert all(f"\n    {name}: " in (Config.__doc__ or "") for name in SETTINGS)


def test_every_field_has_a_variable() -> None:
    assert {f"UCUDNN_{item.name.upper()}" for item in fields(Config)} == {
        variable for variable, *_ in ENVIRONMENT
    }


def test_an_argument_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCUDNN_POLICY", "all")
    monkeypatch.setenv("UCUDNN_WORKSPACE_LIMIT", "1MiB")
    config = Config(policy="undivided", workspace_limit=None)
    assert config.policy == "undivided"
    assert config.limit_bytes is None


def test_a_mistyped_variable_is_warned_of_once_and_after_a_change_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCUDNN_POLCY", "all")
    with pytest.warns(UcudnnWarning, match="UCUDNN_POLCY is no setting of ucudnn") as caught:
        configs = [Config() for _ in range(3)]
    assert [warning.filename for warning in caught] == [__file__]
    assert {config.policy for config in configs} == {"powers-of-two"}
    monkeypatch.setenv("UCUDNN_POLICY", "undivided")
    with pytest.warns(UserWarning, match="UCUDNN_POLCY is no setting of ucudnn"):
        assert Config().policy == "undivided"
    monkeypatch.delenv("UCUDNN_POLICY")
    with pytest.warns(UserWarning, match="UCUDNN_POLCY is no setting of ucudnn"):
        assert Config().policy == "powers-of-two"


# The variables of the released mu-cuDNN, as its README documents them.


@pytest.mark.parametrize(
    ("variable", "text", "values"),
    [
        ("UCUDNN_BATCH_SIZE_POLICY", "undivided", {"policy": "undivided"}),
        ("UCUDNN_BATCH_SIZE_POLICY", "powerOfTwo", {"policy": "powers-of-two"}),
        ("UCUDNN_BATCH_SIZE_POLICY", "all", {"policy": "all"}),
        ("UCUDNN_DEFAULT_WORKSPACE_LIMIT", "67108864", {"workspace_limit": 64 << 20}),
        ("UCUDNN_TOTAL_WORKSPACE_SIZE", "67108864", {"total_workspace": 64 << 20}),
    ],
)
def test_mucudnn_variables_are_mapped(variable: str, text: str, values: dict[str, Any]) -> None:
    assert read_environment({variable: text}) == values


def test_the_new_variable_goes_before_the_old() -> None:
    environment = {
        "UCUDNN_BATCH_SIZE_POLICY": "all",
        "UCUDNN_POLICY": "undivided",
        "UCUDNN_DEFAULT_WORKSPACE_LIMIT": "1",
        "UCUDNN_WORKSPACE_LIMIT": "2",
    }
    assert Config(**read_environment(environment)) == Config(policy="undivided", workspace_limit=2)


@pytest.mark.parametrize(
    ("variable", "text", "remedy"),
    [
        ("UCUDNN_BATCH_SIZE_POLICY", "some", "must be one of undivided, powerOfTwo, all"),
        ("UCUDNN_DEFAULT_WORKSPACE_LIMIT", "much", "must be a number of bytes"),
        ("UCUDNN_TOTAL_WORKSPACE_SIZE", "much", "must be a number of bytes"),
        ("UCUDNN_BENCHMARK_DEVICES", "0,1", "unset it"),
        ("UCUDNN_DATABASE", "some.db", "set UCUDNN_CACHE"),
    ],
)
def test_mucudnn_variables_without_equivalent_are_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, remedy: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=remedy) as caught:
        Config()
    assert variable in str(caught.value)


def test_json_round_trip_leaves_out_the_cache_which_names_a_host() -> None:
    config = Config(workspace_limit="8MiB", policy="all", ops="dgrad", unplanned="error", cache="x")
    values = config.to_dict()
    assert not {"cache", "device"} & set(values)
    again = Config.from_dict(values)
    assert again.to_dict() == values
    assert again.limit_bytes == 8 << 20


@pytest.mark.parametrize("name", ["colour", "cache", "device", "time_budget_s"])
def test_a_file_holds_the_settings_of_a_plan_and_no_others(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Config.from_dict({**Config().to_dict(), name: None})


def test_a_file_holds_all_settings_of_a_plan() -> None:
    values = Config(policy="all").to_dict()
    del values["policy"]
    with pytest.raises(ConfigError, match="policy"):
        Config.from_dict(values)


def test_a_value_from_the_environment_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCUDNN_WORKSPACE_LIMIT", "foo")
    with pytest.raises(ConfigError, match=r"got 'foo'; it is from .* UCUDNN_WORKSPACE_LIMIT$"):
        Config()
    with pytest.raises(ConfigError, match="got 'bar'$"):
        Config(workspace_limit="bar")
    assert Config(workspace_limit=3).limit_bytes == 3


def test_settings_of_another_type_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"config must be a ucudnn.Config, .* got dict"):
        require_config({"workspace_limit": "1MiB"})
