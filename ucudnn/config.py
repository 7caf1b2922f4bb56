"""One table of all settings, with their checks; only this module reads UCUDNN_* variables."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from ucudnn.errors import ConfigError, quoted, warn
from ucudnn.problem import OPS
from ucudnn.units import parse_bytes

# A memory budget as a share of the peak of a step by torch, such as 50%.
_SHARE = re.compile(r"\s*(\d{1,3}(?:\.\d+)?)\s*%\s*")

Policy = Literal["undivided", "powers-of-two", "all"]
Unplanned = Literal["torch", "error"]
# "auto", "recorded" and the names in backends/registry.py, which this module must not import.
Backend = Literal["auto", "torch_cpu", "cudnn", "recorded"]
Solver = Literal["auto", "exact", "highs", "cbc"]
Effort = Literal["quick", "normal", "thorough"]
Layout = Literal["keep", "auto"]
POLICIES: tuple[str, ...] = get_args(Policy)

# Variables that ucudnn sets for ranks, and that are not settings: the number of ranks that share a
# device, which is a condition of every measurement, and the folder where ranks count their samples
# during a trial of `ucudnn launch`.
RANKS_PER_DEVICE, PROGRESS = "UCUDNN_RANKS_PER_DEVICE", "UCUDNN_PROGRESS"

# Variables of the released mu-cuDNN (2018). A variable is mapped to the setting here that means the
# same. If there is none, it is refused: if it were ignored, the run would not be what the user
# asked for.
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


# Variables that name files for an unchanged script: no settings of tuning, no fields of `Config`.
_PLAN, _RECORD = "UCUDNN_PLAN", "UCUDNN_RECORD"


class Setting(NamedTuple):
    """One setting: a row of the table that defines `Config`, its variables, flags and docs."""

    default: Any
    check: Callable[[str, Any], Any]  # called with (name, given value); returns the checked value
    help: str  # whole sentences; `--help` shows only the first
    metavar: str = ""  # "" for a switch
    choices: tuple[str, ...] = ()
    is_of_plan: bool = True  # False if plans do not keep it, such as the cache or the time budget
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
    share = _SHARE.fullmatch(value) if isinstance(value, str) else None
    return f"{share[1]}%" if share else _size(name, value)


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
    # An environment variable is always text.
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
    # Each op is listed once and in a fixed order, so that equal choices are equal, and the hashes
    # of their plans are, too.
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
        # True is refused, although Python treats it as 1. nan is refused, because it is not above
        # 0.
        if isinstance(value, (int, float, str)) and value is not True and float(value) > 0:
            return float(value)
    except (ValueError, OverflowError):  # no number, or an int beyond the range of a float
        pass
    raise ConfigError(f"{name} must be a number above 0 or None, got {quoted(value)}")


# The settings by name, in the order of the documentation. Each has a variable UCUDNN_<NAME>.
SETTINGS: dict[str, Setting] = {
    "workspace_limit": Setting(
        None,
        _size,
        "Workspace that each kernel may use, such as 64MiB.",
        "SIZE",
        page="using.md#what-is-limited",
    ),
    "memory_budget": Setting(
        None,
        _budget,
        "Memory that a whole step may have allocated, such as 8GiB, or 50% of what it has by "
        "torch. Parameters, gradients, optimiser state, activations and workspace count. Modules "
        "run in micro-batches where it takes that to stay within it.",
        "SIZE",
        page="memory.md",
    ),
    "loop": Setting(
        False,
        _switch,
        "Plan for a training loop that runs the model on micro-batches and adds their gradients "
        "up, by plan.micro_batches, where that is faster or the budget asks for it.",
        page="memory.md",
    ),
    "total_workspace": Setting(
        None,
        _size,
        "One pool of which every call owns a part (WD), such as 512MiB. Without it, all kernels "
        "share one workspace (WR).",
        "SIZE",
        page="solvers.md",
    ),
    "policy": Setting("powers-of-two", _choice, "Micro-batch sizes.", "NAME", POLICIES),
    "layout": Setting(
        "keep",
        _choice,
        "Plan a model as it is, or in the faster of its own layout and channels_last.",
        "NAME",
        get_args(Layout),
        page="using.md#layout",
    ),
    "ops": Setting(
        OPS,
        _passes,
        "Passes to plan: some of fprop,dgrad,wgrad. They are forward, the gradients of inputs and "
        "those of weights.",
        "NAMES",
    ),
    "effort": Setting(
        "normal",
        _choice,
        "How long to look for how small a gain. By default tuning takes at most the time of 25 "
        "steps (5 to 30 s), of 100 steps (10 to 45 s), or any time; on a GPU 30 s, 45 s, or any.",
        "NAME",
        get_args(Effort),
        is_of_plan=False,
        page="measuring.md#effort-and-a-time-budget",
    ),
    "time_budget_s": Setting(
        None,
        _positive,
        "Seconds that tuning may take. Kernels that are not finished then run torch's own "
        "convolution.",
        "SECONDS",
        is_of_plan=False,
    ),
    "unplanned": Setting(
        "torch",
        _choice,
        "What becomes of convolutions without a plan. With torch, they are torch's own, with a "
        "warning; a plan for another device is not followed, and kernels that nothing fits are "
        "left out of a plan. With error, each of these, and a plan made with other versions or "
        "threads, is an error. UCUDNN_UNPLANNED goes before what a plan says.",
        "NAME",
        get_args(Unplanned),
        page="using.md#refuse-what-is-not-planned",
    ),
    "deterministic": Setting(
        None,
        _switch,
        "Only algorithms that give the same bits on the same operands in every run. Default: as "
        "torch.use_deterministic_algorithms says.",
        page="using.md#deterministic-training",
    ),
    "max_error": Setting(
        None,
        _positive,
        "Largest relative error (L2) against float64 that an algorithm may have. Default: as much "
        "as rounding explains.",
        "ERROR",
    ),
    "step_race": Setting(
        True,
        _switch,
        "Time whole steps of the model at the end, and give kernels that do not pay back to torch.",
        is_of_plan=False,
    ),
    "solver": Setting(
        "auto",
        _choice,
        "Solver that divides the pool.",
        "NAME",
        get_args(Solver),
        page="solvers.md",
    ),
    "backend": Setting(
        "auto",
        _choice,
        "Library that computes the convolutions. With auto it is that of this machine's device; "
        "with recorded, measurements in the cache, or in an exported .csv or .json file, are "
        "replayed, and nothing runs.",
        "NAME",
        get_args(Backend),
    ),
    "device": Setting(
        None,
        _path,
        "A device that is not here: for recorded part of its name, for cudnn its profile. A "
        "profile is a file that `ucudnn doctor` wrote there, or h200, which the package has.",
        "NAME",
        is_of_plan=False,
        page="cudnn.md",
    ),
    "cache": Setting(
        None,
        _path,
        "Folder of the measurement cache. Default: the user's cache directory.",
        "DIR",
        is_of_plan=False,
        page="formats.md#the-measurement-cache",
    ),
}


def _default(name: str) -> Any:
    """A dataclass field whose default comes from UCUDNN_<NAME> when a Config is made."""
    setting = SETTINGS[name]
    return field(
        default_factory=lambda: _settings().get(name, setting.default), compare=setting.is_of_plan
    )


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of tuning, and of running a plan; each defaults to the variable UCUDNN_<NAME>.

    >>> Config(workspace_limit="64MiB").limit_bytes
    67108864

    Raises:
        ConfigError: a value is not allowed; the message lists the allowed ones.
    """

    workspace_limit: int | str | None = _default("workspace_limit")
    total_workspace: int | str | None = _default("total_workspace")
    memory_budget: int | str | None = _default("memory_budget")
    loop: bool = _default("loop")
    solver: Solver = _default("solver")
    policy: Policy = _default("policy")
    ops: tuple[str, ...] = _default("ops")
    unplanned: Unplanned = _default("unplanned")
    cache: str | None = _default("cache")
    backend: Backend = _default("backend")
    device: str | None = _default("device")
    deterministic: bool | None = _default("deterministic")
    max_error: float | None = _default("max_error")
    layout: Layout = _default("layout")
    effort: Effort = _default("effort")
    time_budget_s: float | None = _default("time_budget_s")
    step_race: bool = _default("step_race")

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            try:
                value = setting.check(name, getattr(self, name))
            except ConfigError as error:
                raise self._with_source(error, name) from error
            # Replace the given value by the checked one. In a frozen dataclass this is the only
            # way.
            object.__setattr__(self, name, value)
        if self.memory_budget is not None and self.total_workspace is not None:
            raise ConfigError(
                "memory_budget is of convolutions that share their workspace, and total_workspace "
                "of calls that each own a part; set one of them"
            )
        # A pass without a plan may take any amount of workspace, so no budget could be kept.
        if self.memory_budget is not None and self.ops not in (OPS, ("fprop",)):
            raise ConfigError(
                f"memory_budget needs a plan for every pass: ops must be {','.join(OPS)}, or fprop "
                f"for inference, got {','.join(self.ops)}"
            )

    def _with_source(self, error: ConfigError, name: str) -> ConfigError:
        """The error of a field; it names the environment variable if the value came from one."""
        given = _settings().get(name)
        if given is None or given is not getattr(self, name):
            return error
        return ConfigError(f"{error}; it is from the environment variable UCUDNN_{name.upper()}")

    @property
    def limit_bytes(self) -> int | None:
        """The workspace limit in bytes, None for no limit."""
        assert not isinstance(self.workspace_limit, str)
        return self.workspace_limit

    @property
    def total_bytes(self) -> int | None:
        """The size of the pool in bytes; None if kernels share one workspace."""
        assert not isinstance(self.total_workspace, str)
        return self.total_workspace

    @property
    def budget_bytes(self) -> int | None:
        """The memory budget in bytes; None if there is none, or if it is a share of a step's peak.

        >>> Config(memory_budget="50%").with_budget_of(300).budget_bytes
        150
        """
        return None if isinstance(self.memory_budget, str) else self.memory_budget

    def with_budget_of(self, peak_bytes: int) -> Config:
        """The settings with the memory budget in bytes, if it was given as a share of this peak."""
        if not isinstance(self.memory_budget, str):
            return self
        share = float(self.memory_budget.removesuffix("%")) / 100
        return replace(self, memory_budget=int(share * peak_bytes))

    @property
    def is_replayed(self) -> bool:
        """True if nothing is measured, because a recording is replayed.

        >>> Config(backend="recorded").is_replayed
        True
        >>> Config(backend="cudnn", device="h200").is_replayed
        True
        """
        return self.backend == "recorded" or (self.backend == "cudnn" and self.device is not None)

    def to_dict(self) -> dict[str, Any]:
        """The fields that a plan keeps, as JSON values; the cache folder, for example, is not."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values = {name: value for name, value in values.items() if SETTINGS[name].is_of_plan}
        return {**values, "ops": list(self.ops)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build a Config from JSON values; environment variables have no effect.

        The fields must be exactly those of `to_dict`, so no file can name a folder to write to.

        >>> Config.from_dict(Config(policy="all").to_dict()).policy
        'all'
        """
        if odd := {name for name, one in SETTINGS.items() if one.is_of_plan} ^ set(values):
            raise ConfigError(f"the settings of a plan lack or must not have {quoted(min(odd))}")
        # Every field is passed, so that no default reads this process's environment.
        return cls(**{**{name: one.default for name, one in SETTINGS.items()}, **values})


# The docstring may be None, because `python -OO` removes docstrings.
Config.__doc__ = cleandoc(Config.__doc__ or "") + "\n\nArgs:\n"
Config.__doc__ += "\n".join(f"    {name}: {one.meaning}" for name, one in SETTINGS.items())
# Shows the defaults; the signature of the dataclass would show a factory for each of them.
Config.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        Parameter(one.name, Parameter.POSITIONAL_OR_KEYWORD, default=SETTINGS[one.name].default)
        for one in fields(Config)
    ]
)


def require_config(config: object) -> Config:
    """The settings that a public function was given; the default settings if it was given None."""
    if config is None:
        return Config()
    if not isinstance(config, Config):
        raise ConfigError(
            f"config must be a ucudnn.Config, such as Config(workspace_limit='64MiB'), got "
            f"{type(config).__name__}"
        )
    return config


def settings_here(config: Config) -> Config:
    """The settings by which a plan runs: its own, unless UCUDNN_UNPLANNED is set."""
    given = _settings().get("unplanned")
    return config if given is None else replace(config, unplanned=given)


def is_strict() -> bool:
    """True if UCUDNN_UNPLANNED asks for errors; the other variables are not read or checked."""
    return os.environ.get("UCUDNN_UNPLANNED") == "error"


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Settings given by UCUDNN_* variables, by field name.

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
    """Warn of unknown UCUDNN_* variables; refuse variables of mu-cuDNN without an equivalent."""
    _settings()


class Startup(NamedTuple):
    """The plan that a process follows from its start, or the file to which it records."""

    plan: str | None = None
    record: str | None = None

    def __bool__(self) -> bool:
        return self.plan is not None or self.record is not None


def startup() -> Startup:
    """The files that UCUDNN_PLAN and UCUDNN_RECORD name."""
    # A variable that is empty counts as not set, as those of settings do.
    return Startup(os.environ.get(_PLAN) or None, os.environ.get(_RECORD) or None)


def set_startup(files: Startup) -> None:
    """Set UCUDNN_PLAN and UCUDNN_RECORD for processes that this one starts; no file: unset them."""
    for name, value in ((_PLAN, files.plan), (_RECORD, files.record)):
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def environment_without_startup() -> dict[str, str]:
    """The environment for a process that measures: no plan may change what it times."""
    return {name: value for name, value in os.environ.items() if name not in (_PLAN, _RECORD)}


def ranks_per_device() -> int:
    """Number of ranks that share the device of this process; 1 if the variable is not set."""
    text = os.environ.get(RANKS_PER_DEVICE) or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{RANKS_PER_DEVICE} must be a number above 0, got {quoted(text)}")
    return int(text)


def rank_variables(ranks_per_device: int, limit_bytes: int | None = None) -> dict[str, str]:
    """Environment variables that `ucudnn launch` sets for each rank.

    >>> rank_variables(2, limit_bytes=1024)
    {'UCUDNN_RANKS_PER_DEVICE': '2', 'UCUDNN_WORKSPACE_LIMIT': '1024'}
    """
    limit = {} if limit_bytes is None else {"UCUDNN_WORKSPACE_LIMIT": str(limit_bytes)}
    return {RANKS_PER_DEVICE: str(ranks_per_device), **limit}


def progress_folder() -> str | None:
    """Folder where ranks count their samples during a trial of `ucudnn launch`; else None."""
    return os.environ.get(PROGRESS)


def share_device(ranks: int) -> None:
    """Set how many ranks share the device, for this process and for processes that it starts."""
    os.environ[RANKS_PER_DEVICE] = str(ranks)


def _settings() -> dict[str, Any]:
    # The variables are sorted, so that the key of the cache below stays equal as long as no
    # variable changes.
    variables = [item for item in os.environ.items() if item[0].startswith("UCUDNN_")]
    return _settings_from(tuple(sorted(variables)))


# The result is cached, because every field of every Config calls this function. It also has the
# effect that a mistyped variable gives one warning, and another one only after a variable has
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
                f"are {', '.join(sorted(known))}",
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
