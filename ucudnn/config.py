"""`Config`: all settings, with their checks; only this module reads UCUDNN_* variables."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from inspect import Parameter, Signature, cleandoc
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from ucudnn.errors import ConfigError, quoted, warn
from ucudnn.problem import OPS
from ucudnn.units import parse_bytes

# A memory budget such as 50%: a share of the peak memory of a step with torch's own convolutions.
_SHARE = re.compile(r"\s*(\d{1,3}(?:\.\d+)?)\s*%\s*")
# The memory budget that is all memory a device has free when tuning begins, less a margin: this
# fraction of it, and at least so many bytes. The budget counts what tensors need, and a device
# needs more. torch's allocator for GPUs loses the ends of blocks that it has split. malloc keeps
# freed blocks, and pages of its own for each thread. Libraries load code, and other processes come.
AVAILABLE = "available"
MARGIN_SHARE = 0.05
LEAST_MARGIN_BYTES = 64 << 20

Policy = Literal["undivided", "powers-of-two", "all"]
Unplanned = Literal["torch", "error"]
# "auto", "recorded" and the names in backends/registry.py, which this module must not import.
Backend = Literal["auto", "torch_cpu", "cudnn", "recorded"]
Solver = Literal["auto", "exact", "highs", "cbc"]
Effort = Literal["quick", "normal", "thorough"]
Layout = Literal["keep", "auto"]
Compile = Literal["keep", "auto"]
POLICIES: tuple[str, ...] = get_args(Policy)

# Two environment variables that ucudnn sets for ranks (processes of a distributed job). They are
# not settings. The first holds the number of ranks that share a device; it is part of the
# conditions of every measurement. The second holds the folder where ranks count their samples while
# `ucudnn launch` tries out numbers of ranks.
RANKS_PER_DEVICE, PROGRESS = "UCUDNN_RANKS_PER_DEVICE", "UCUDNN_PROGRESS"

# Environment variables of mu-cuDNN, as it was released in 2018. A variable in `_MUCUDNN_MAPPED`
# gives a value to the setting of ucudnn that means the same. A variable in `_MUCUDNN_REFUSED` has
# no such setting and raises an error: if it were ignored, the run would not be what the user asked
# for.
_MUCUDNN_POLICIES = {"undivided": "undivided", "powerOfTwo": "powers-of-two", "all": "all"}
_MUCUDNN_BYTES = {
    "UCUDNN_DEFAULT_WORKSPACE_LIMIT": "workspace_limit",
    "UCUDNN_TOTAL_WORKSPACE_SIZE": "total_workspace",
}
_MUCUDNN_MAPPED = {"UCUDNN_BATCH_SIZE_POLICY", *_MUCUDNN_BYTES}
_MUCUDNN_REFUSED = {
    "UCUDNN_BENCHMARK_DEVICES": "tuning uses the device that the model runs on; unset it",
    "UCUDNN_DATABASE": "measurements are no longer kept in SQLite; "
    "set UCUDNN_CACHE to a folder instead",
}


# Environment variables for a script that runs unchanged. The first names the plan that the script
# follows. The second names the table to which the convolutions of the script are recorded. They are
# not settings, so `Config` has no such fields. The third, which is one, has the script's model
# planned within this memory.
_PLAN, _RECORD, _BUDGET = "UCUDNN_PLAN", "UCUDNN_RECORD", "UCUDNN_MEMORY_BUDGET"


class Setting(NamedTuple):
    """One setting, as a field of `Config` has it; variables, flags and docs are made from it."""

    default: Any
    check: Callable[[str, Any], Any]  # called with (name, given value); returns the checked value
    help: str  # whole sentences; `--help` shows only the first
    metavar: str = ""  # "" for a switch, a flag without a value
    choices: tuple[str, ...] = ()
    is_of_plan: bool = True  # False if plans do not store it, such as the cache folder
    page: str = ""  # page of the documentation that explains the setting

    @property
    def summary(self) -> str:
        """One sentence on what the setting does, with the values that it allows."""
        words = f": {', '.join(self.choices)}" if self.choices else ""
        return f"{self.help.partition('. ')[0].removesuffix('.')}{words}."

    @property
    def meaning(self) -> str:
        """The full description of the setting."""
        return f"{self.summary} {self.help.partition('. ')[2]}".rstrip()


def _size(name: str, value: Any) -> int | None:
    return None if value is None else parse_bytes(value, name)


def _budget(name: str, value: Any) -> int | str | None:
    if isinstance(value, str):
        if value.strip() == AVAILABLE:
            return AVAILABLE
        if share := _SHARE.fullmatch(value):
            return f"{share[1]}%"
    try:
        return _size(name, value)
    except ConfigError as error:
        raise ConfigError(f"{error}; or a share such as 50%, or {AVAILABLE}") from error


def _choice(name: str, value: Any) -> str:
    allowed = SETTINGS[name].choices
    # The type is tested first: if the value were a NumPy array, `in` would compare each of its
    # elements with the allowed words.
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {quoted(value)}")
    return value


def _switch(name: str, value: object) -> bool | None:
    may_be_none = SETTINGS[name].default is None
    if may_be_none and value is None:
        return None
    # The value of an environment variable is text.
    texts = {"1": True, "true": True, "0": False, "false": False}
    found = texts.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        allowed = "True, False or None" if may_be_none else "True or False"
        raise ConfigError(f"{name} must be {allowed}, got {quoted(value)}")
    return found


def _passes(name: str, value: Any) -> tuple[str, ...]:
    ops = value.split(",") if isinstance(value, str) else value
    is_list = isinstance(ops, (tuple, list)) and bool(ops)
    if not is_list or not all(isinstance(op, str) and op in OPS for op in ops):
        raise ConfigError(f"{name} must name some of {', '.join(OPS)}, got {quoted(value)}")
    # Each op is listed once and in a fixed order. So two Configs with the same ops are equal, and
    # their plans can have equal hashes.
    return tuple(op for op in OPS if op in ops)


def _path(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, (str, Path)):
        what = {"cache": "a folder's path", "device": "a device's name or a profile"}[name]
        raise ConfigError(f"{name} must be {what} or None, got {quoted(value)}")
    return None if value is None else str(value)


def _positive(name: str, value: object) -> float | None:
    try:
        if value is None:
            return None
        # True is refused, although Python treats it as 1. nan fails the comparison.
        if isinstance(value, (int, float, str)) and value is not True and 0 < float(value) < inf:
            return float(value)
    except (ValueError, OverflowError):  # no number, or an int beyond the range of a float
        pass
    raise ConfigError(f"{name} must be a number above 0 or None, got {quoted(value)}")


# In a field of `Config`: the setting is not given, so the environment or its default decides.
_NOT_GIVEN: Any = ...


def _setting(*values: Any, **more: Any) -> Any:
    """A field of `Config`; the arguments are those of its `Setting`."""
    setting = Setting(*values, **more)
    return field(default=_NOT_GIVEN, compare=setting.is_of_plan, metadata={"setting": setting})


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of tuning, and of running a plan.

    A setting that is not given is taken from the environment variable UCUDNN_<NAME>. If that is not
    set either, the setting has its default.

    >>> Config(workspace_limit="64MiB").limit_bytes
    67108864

    Raises:
        ConfigError: a value is not allowed, or two settings exclude each other; the message says
            what is allowed.
    """

    workspace_limit: int | str | None = _setting(
        None,
        _size,
        "Workspace of each kernel (WR), such as 64MiB.",
        "SIZE",
        page="using.md#what-is-limited",
    )
    total_workspace: int | str | None = _setting(
        None,
        _size,
        "Pool that all calls divide (WD), such as 512MiB. Every call owns a part. Without a pool, "
        "all kernels share one workspace (WR).",
        "SIZE",
        page="solvers.md",
    )
    memory_budget: int | str | None = _setting(
        None,
        _budget,
        "Memory of a step: 8GiB, 50% or available. A percentage is of what a step by torch has "
        "allocated. With available it is what the device has free when tuning begins, less 5 % or "
        "at least 64MiB, and what the model and its inputs have allocated already. "
        "Parameters, gradients, optimiser state, activations and workspace count. "
        "Where the budget requires it, modules run in micro-batches.",
        "SIZE",
        page="memory.md",
    )
    loop: bool = _setting(
        False,
        _switch,
        "Let the training loop run micro-batches. It runs the model on each and adds the gradients "
        "up, by plan.micro_batches, where that is faster or the budget asks for it.",
        page="memory.md",
    )
    solver: Solver = _setting(
        "auto", _choice, "Solver of the pool.", "NAME", get_args(Solver), page="solvers.md"
    )
    policy: Policy = _setting("powers-of-two", _choice, "Micro-batch sizes.", "NAME", POLICIES)
    ops: tuple[str, ...] = _setting(
        OPS,
        _passes,
        "Passes to plan: some of fprop,dgrad,wgrad. They are forward, the gradients of inputs and "
        "those of weights.",
        "NAMES",
    )
    unplanned: Unplanned = _setting(
        "torch",
        _choice,
        "Convolutions without a plan. With torch, they are torch's own, with a warning; a plan for "
        "another device is not followed, and kernels that nothing fits are left out of a plan. "
        "With error, each of these, and a plan made with other versions or "
        "threads, is an error. UCUDNN_UNPLANNED goes before what a plan says.",
        "NAME",
        get_args(Unplanned),
        page="using.md#refuse-what-is-not-planned",
    )
    cache: str | None = _setting(
        None,
        _path,
        "Folder of the measurement cache. Default: the user's cache directory.",
        "DIR",
        is_of_plan=False,
        page="formats.md#the-measurement-cache",
    )
    backend: Backend = _setting(
        "auto",
        _choice,
        "Library to compute by. With auto it is that of this machine's device; with recorded, "
        "measurements in the cache, or in an exported .csv file, are replayed, and "
        "nothing runs.",
        "NAME",
        get_args(Backend),
    )
    device: str | None = _setting(
        None,
        _path,
        "A device that is not here. With backend recorded it is part of its name; with cudnn its "
        "profile: a file that `ucudnn doctor` wrote there, or h200, which the package has.",
        "NAME",
        is_of_plan=False,
        page="cudnn.md",
    )
    deterministic: bool | None = _setting(
        None,
        _switch,
        "Only deterministic algorithms. They give the same bits on the same operands in every run. "
        "Default: as torch.use_deterministic_algorithms says.",
        page="using.md#deterministic-training",
    )
    max_error: float | None = _setting(
        None,
        _positive,
        "Largest relative error of an algorithm. It is in L2 norm, against float64. Default: as "
        "much as rounding explains.",
        "ERROR",
    )
    layout: Layout = _setting(
        "keep",
        _choice,
        "Layout of the model. With auto, the plan is for the faster of its own layout and "
        "channels_last.",
        "NAME",
        get_args(Layout),
        page="using.md#layout",
    )
    compile: Compile = _setting(
        "keep",
        _choice,
        "Compilation of the model. With auto, a plan may have a model compiled that is not, if "
        "steps are then faster.",
        "NAME",
        get_args(Compile),
        page="using.md#compiled-models",
    )
    compile_budget_s: float | None = _setting(
        None,
        _positive,
        "Seconds for compiling ways to run a step. They are beside those of time_budget_s, and "
        "count the first steps of each way. The first way is always compiled. Default: three times "
        "what the first way took.",
        "SECONDS",
        is_of_plan=False,
        page="using.md#compiled-models",
    )
    effort: Effort = _setting(
        "normal",
        _choice,
        "Search time. The longer, the smaller the gains that are looked for. By default "
        "tuning takes at most the time of 25 steps (5 to 30 s), of 100 steps (10 to 45 s), or any "
        "time, but of 12 steps if they take longer; on a GPU 30 s, 45 s, or any.",
        "NAME",
        get_args(Effort),
        is_of_plan=False,
        page="measuring.md#effort-and-a-time-budget",
    )
    time_budget_s: float | None = _setting(
        None,
        _positive,
        "Seconds that tuning may take. Kernels that are not finished then run torch's own "
        "convolution.",
        "SECONDS",
        is_of_plan=False,
    )
    step_race: bool = _setting(
        True,
        _switch,
        "Judge the plan by whole steps. They are timed at the end, and kernels that do not make "
        "them faster are given back to torch.",
        is_of_plan=False,
    )

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            value, source = getattr(self, name), ""
            if value is _NOT_GIVEN:
                value = setting.default
                if (text := _settings().get(name)) is not None:
                    value = text
                    source = f"; it is from the environment variable UCUDNN_{name.upper()}"
            try:
                value = setting.check(name, value)
            except ConfigError as error:
                raise ConfigError(f"{error}{source}") from error
            # Replace the given value by the checked one. In a frozen dataclass this is the only
            # way.
            object.__setattr__(self, name, value)
        if self.memory_budget is not None and self.total_workspace is not None:
            raise ConfigError(
                "memory_budget is of convolutions that share their workspace, and total_workspace "
                "of calls that each own a part; set one of them"
            )
        # A pass that is not planned may use any amount of workspace, so the step could exceed every
        # memory budget.
        if self.memory_budget is not None and self.ops not in (OPS, ("fprop",)):
            raise ConfigError(
                f"memory_budget needs a plan for every pass: ops must be {','.join(OPS)}, or fprop "
                f"for inference, got {','.join(self.ops)}"
            )

    @property
    def limit_bytes(self) -> int | None:
        """The workspace limit in bytes, None for no limit."""
        assert not isinstance(self.workspace_limit, str)
        return self.workspace_limit

    @property
    def total_bytes(self) -> int | None:
        """The size of the workspace pool in bytes; None if kernels use one workspace in turn."""
        assert not isinstance(self.total_workspace, str)
        return self.total_workspace

    @property
    def budget_bytes(self) -> int | None:
        """The memory budget in bytes; None without a budget, or if it must be resolved first.

        >>> Config(memory_budget="50%").with_budget_of(300).budget_bytes
        150
        """
        return None if isinstance(self.memory_budget, str) else self.memory_budget

    def with_budget_of(
        self, peak_bytes: int, available_bytes: int | None = None, held_bytes: int = 0
    ) -> Config:
        """These settings, with a memory budget of a share or of what is available in bytes.

        >>> Config(memory_budget="available").with_budget_of(0, 1000 << 20, 9 << 20).budget_bytes
        990904320

        Args:
            peak_bytes: the peak of a step by torch, for a share.
            available_bytes: what the process can still allocate on the device.
            held_bytes: what it has allocated of that which a budget counts.
        """
        if not isinstance(self.memory_budget, str):
            return self
        if self.memory_budget != AVAILABLE:
            share = float(self.memory_budget.removesuffix("%")) / 100
            return replace(self, memory_budget=int(share * peak_bytes))
        if available_bytes is None:
            raise ConfigError(
                f"memory_budget={AVAILABLE} is what the device has free, and that is not known "
                f"here; give bytes or a share such as 50%"
            )
        margin = max(LEAST_MARGIN_BYTES, int(MARGIN_SHARE * available_bytes))
        return replace(self, memory_budget=held_bytes + max(0, available_bytes - margin))

    @property
    def is_replayed(self) -> bool:
        """True if nothing is measured here, because recorded measurements are replayed.

        >>> Config(backend="recorded").is_replayed
        True
        >>> Config(backend="cudnn", device="h200").is_replayed
        True
        """
        return self.backend == "recorded" or (self.backend == "cudnn" and self.device is not None)

    def to_dict(self) -> dict[str, Any]:
        """The settings that a plan stores, as JSON values; the cache, for example, is left out."""
        values = {name: getattr(self, name) for name, one in SETTINGS.items() if one.is_of_plan}
        return {**values, "ops": list(self.ops)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build a Config from JSON values; environment variables have no effect.

        The fields must be exactly those of `to_dict`. So the file of a plan cannot name, for
        example, a cache folder to which this process would write.

        >>> Config.from_dict(Config(policy="all").to_dict()).policy
        'all'
        """
        if odd := {name for name, one in SETTINGS.items() if one.is_of_plan} ^ set(values):
            raise ConfigError(f"the settings of a plan lack or must not have {quoted(min(odd))}")
        # Every field is given a value, because a field without one would be read from the
        # environment.
        return cls(**{**{name: one.default for name, one in SETTINGS.items()}, **values})


# The settings by name.
SETTINGS: dict[str, Setting] = {one.name: one.metadata["setting"] for one in fields(Config)}
# The docstring may be None, because `python -OO` removes docstrings.
Config.__doc__ = cleandoc(Config.__doc__ or "") + "\n\nArgs:\n"
Config.__doc__ += "\n".join(f"    {name}: {one.meaning}" for name, one in SETTINGS.items())
# The signature that `help` shows, with the defaults. The signature that the dataclass makes would
# show a factory in place of each default.
Config.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=one.default)
        for name, one in SETTINGS.items()
    ]
)


def require_config(config: object) -> Config:
    """Check the argument `config` of a public function; None stands for the default settings."""
    if config is None:
        return Config()
    if not isinstance(config, Config):
        raise ConfigError(
            f"config must be a ucudnn.Config, such as Config(workspace_limit='64MiB'), got "
            f"{type(config).__name__}"
        )
    return config


def settings_here(config: Config) -> Config:
    """The settings of a plan as it runs here: UCUDNN_UNPLANNED, if set, replaces `unplanned`."""
    given = _settings().get("unplanned")
    return config if given is None else replace(config, unplanned=given)


def is_strict() -> bool:
    """True if UCUDNN_UNPLANNED is "error"; this reads and checks no other variable."""
    return os.environ.get("UCUDNN_UNPLANNED") == "error"


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings that UCUDNN_* variables give, by the name of the field of `Config`.

    >>> read_environment({"UCUDNN_BATCH_SIZE_POLICY": "powerOfTwo"})
    {'policy': 'powers-of-two'}
    """
    for name, reason in _MUCUDNN_REFUSED.items():
        if name in environment:
            raise ConfigError(f"environment variable {name} is not supported: {reason}")
    found = _of_mucudnn(environment)
    for name in SETTINGS:
        value = environment.get(f"UCUDNN_{name.upper()}")
        if value:  # empty counts as unset, as in a shell
            found[name] = value
    return found


def check_environment() -> None:
    """Warn of unknown UCUDNN_* variables; raise ConfigError for wrong variables of mu-cuDNN."""
    _settings()


class Startup(NamedTuple):
    """What a process does from its start on: follow a plan, record, or keep a memory budget."""

    plan: str | None = None  # a file
    record: str | None = None  # a file
    memory_budget: str | None = None

    def __bool__(self) -> bool:
        return any(one is not None for one in self)


def startup() -> Startup:
    """What UCUDNN_PLAN, UCUDNN_RECORD and UCUDNN_MEMORY_BUDGET say."""
    # An empty variable counts as not set, as for settings.
    return Startup(*(os.environ.get(name) or None for name in (_PLAN, _RECORD, _BUDGET)))


def set_startup(files: Startup) -> None:
    """Set UCUDNN_PLAN, UCUDNN_RECORD and UCUDNN_MEMORY_BUDGET for child processes.

    Unset the first two if there is no such file; the third is also a default of settings.
    """
    for name, value in ((_PLAN, files.plan), (_RECORD, files.record)):
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if files.memory_budget is not None:
        os.environ[_BUDGET] = files.memory_budget


def environment_without_startup() -> dict[str, str]:
    """The environment without what `startup` reads, for a process that measures.

    A process that followed a plan would not time the convolutions that it is told to time.
    """
    read = (_PLAN, _RECORD, _BUDGET)
    return {name: value for name, value in os.environ.items() if name not in read}


def ranks_per_device() -> int:
    """Number of ranks that share the device of this process, from UCUDNN_RANKS_PER_DEVICE, or 1."""
    text = os.environ.get(RANKS_PER_DEVICE) or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{RANKS_PER_DEVICE} must be a number above 0, got {quoted(text)}")
    return int(text)


def rank_variables(ranks_per_device: int, limit_bytes: int | None = None) -> dict[str, str]:
    """Environment variables to set for each of several ranks that share a device.

    >>> rank_variables(2, limit_bytes=1024)
    {'UCUDNN_RANKS_PER_DEVICE': '2', 'UCUDNN_WORKSPACE_LIMIT': '1024'}
    """
    limit = {} if limit_bytes is None else {"UCUDNN_WORKSPACE_LIMIT": str(limit_bytes)}
    return {RANKS_PER_DEVICE: str(ranks_per_device), **limit}


def progress_folder() -> str | None:
    """Where ranks write their counts of samples if `launch` tries numbers of ranks; else None."""
    return os.environ.get(PROGRESS)


def _settings() -> dict[str, Any]:
    # The variables are sorted, because `_settings_from` caches its result by this tuple: as long as
    # no variable changes, the tuple must stay equal.
    variables = [item for item in os.environ.items() if item[0].startswith("UCUDNN_")]
    return _settings_from(tuple(sorted(variables)))


# The result is cached, because every field of every Config calls this function. The cache also
# limits warnings: an unknown variable is warned of once, and again only after some variable has
# changed.
@lru_cache(maxsize=1)
def _settings_from(variables: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    environment = dict(variables)
    found = read_environment(environment)
    known = {f"UCUDNN_{name.upper()}" for name in SETTINGS} | _MUCUDNN_MAPPED
    known |= {_PLAN, _RECORD}
    for name in environment:
        if name not in known and name not in {RANKS_PER_DEVICE, PROGRESS}:
            warn(
                f"environment variable {name} is no setting of ucudnn and has no effect; settings "
                f"are {', '.join(sorted(known))}"
            )
    return found


def _of_mucudnn(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        ours: parse_bytes(environment[name], name)
        for name, ours in _MUCUDNN_BYTES.items()
        if name in environment
    }
    policy = environment.get("UCUDNN_BATCH_SIZE_POLICY")
    if policy is None:
        return found
    if policy not in _MUCUDNN_POLICIES:
        raise ConfigError(
            f"UCUDNN_BATCH_SIZE_POLICY must be one of {', '.join(_MUCUDNN_POLICIES)}, got "
            f"{quoted(policy)}; or set UCUDNN_POLICY to one of {', '.join(POLICIES)}"
        )
    return {**found, "policy": _MUCUDNN_POLICIES[policy]}
