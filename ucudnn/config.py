"""Settings, validated; the only module that reads UCUDNN_* environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

from ucudnn import settings
from ucudnn.errors import ConfigError, warn
from ucudnn.problem import OPS

Policy = Literal["undivided", "powers-of-two", "all"]
Unplanned = Literal["torch", "error"]
# The names in backends/registry.py, which this module must not import, and two more.
Backend = Literal["auto", "torch_cpu", "cudnn", "recorded"]
Solver = Literal["auto", "exact", "highs", "cbc"]
Effort = Literal["quick", "normal", "thorough"]
Layout = Literal["keep", "auto"]
# The same at run time, for which type checkers are no help.
POLICIES: tuple[str, ...] = get_args(Policy)
UNPLANNED: tuple[str, ...] = get_args(Unplanned)
BACKENDS: tuple[str, ...] = get_args(Backend)
SOLVERS: tuple[str, ...] = get_args(Solver)
EFFORT_NAMES: tuple[str, ...] = get_args(Effort)
LAYOUTS: tuple[str, ...] = get_args(Layout)

# Facts that `ucudnn launch` tells its ranks, no settings: how many share a device, which is part of
# the conditions of every measurement, and where they count samples in a trial.
RANKS_PER_DEVICE, PROGRESS = "UCUDNN_RANKS_PER_DEVICE", "UCUDNN_PROGRESS"

# Variables of the released mu-cuDNN (2018). Mapped where we have the same setting, else refused:
# silently ignoring one would give a run that is not the one its user asked for.
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


# Files that an unchanged script is run with: no settings of tuning, and no fields of `Config`.
_PLAN, _RECORD = "UCUDNN_PLAN", "UCUDNN_RECORD"

# Defaults where the environment sets nothing. A plan file gets the same for fields that it lacks.
_FALLBACKS: dict[str, Any] = {
    "workspace_limit": None,
    "total_workspace": None,
    "memory_budget": None,
    "solver": "auto",
    "policy": "powers-of-two",
    "ops": OPS,
    "unplanned": "torch",
    "deterministic": None,
    "cache": None,
    "backend": "auto",
    "device": None,
    "device_profile": None,
    "max_error": None,
    "layout": "keep",
    "effort": "normal",
    "time_budget_s": None,
    "step_race": True,
}
# Fields that say where a process looks and what tuning may cost there, not what a plan is.
_OF_THE_PROCESS = frozenset(
    {"cache", "device", "device_profile", "effort", "time_budget_s", "step_race"}
)
_SWITCHES = ("deterministic",)


def _default(name: str, compare: bool = True) -> Any:
    """A dataclass field whose default comes from UCUDNN_<NAME> when a Config is made."""

    def read() -> Any:
        return _settings().get(name, _FALLBACKS[name])

    return field(default_factory=read, compare=compare)


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of tuning, and of layers whose shapes have no plan.

    Every field defaults to the environment variable UCUDNN_<FIELD> if that is set.

    >>> Config(workspace_limit="64MiB").limit_bytes
    67108864

    Args:
        workspace_limit: bytes of workspace that each kernel may use, as an int or "64MiB"; None: no
            limit.
        total_workspace: bytes of one pool, for kernels that overlap or keep their workspace: every
            call of every kernel owns a part of it. None: kernels run one after the other and share
            one workspace.
        memory_budget: bytes that a whole step may have allocated at any moment: parameters,
            gradients, optimiser state, activations and workspace together, as an int or "8GiB".
            The workspace limit of a kernel is the budget minus what the step has allocated when
            the kernel runs. None: no limit.
        solver: solver that divides the pool: "auto", "exact", "highs" or "cbc" (by PuLP).
        policy: micro-batch sizes to try: "undivided", "powers-of-two" or "all".
        ops: which passes to plan: "fprop" (forward), "dgrad" (gradients of inputs), "wgrad" (of
            weights).
        unplanned: what becomes of convolutions that no plan covers. "torch": torch's own
            convolution computes them, with one warning for each shape; a plan for another device
            is not followed, with a warning; kernels of which nothing fits the workspace limit are
            left out of the plan, with a warning. "error": each of these is an error, and so is a
            plan that was made with other versions or threads, or with an algorithm that is gone.
            UCUDNN_UNPLANNED goes before what a plan says.
        cache: folder of the measurement cache; None: the user's cache directory.
        backend: "auto" (the device's own), "torch_cpu", "cudnn", or "recorded": replay the
            measurements of a device, which need not be here, from the cache or from a .csv or .json
            file that was exported from one.
        device: for "recorded", part of the name of the device; None: the only device in the cache.
        device_profile: for "cudnn" on a machine without the GPU: the file that `ucudnn doctor`
            wrote on the GPU, or "h200", which the package has. Plans use the measurements of that
            GPU in the cache, as far as this cuDNN could run them.
        deterministic: only algorithms that give the same bits whenever they are run on the same
            operands; None: as `torch.use_deterministic_algorithms` says when tuning begins.
        max_error: largest relative error (L2) against float64 that an algorithm may have; None: as
            much as rounding explains.
        layout: "keep" plans a model as it is; "auto" plans it in channels_last, too (3-D:
            channels_last_3d), and keeps the faster plan; `convert_` then puts the model into the
            plan's layout. It has no effect on layers without a model.
        effort: "quick", "normal" or "thorough": how long to look for how small a gain. The default
            time budget is 25 steps of the model (5 to 30 s), 100 steps (10 to 45 s), or none; on a
            GPU it is the longest, 30 or 45 s.
        time_budget_s: seconds that tuning may take; kernels that are not finished then run torch's
            own convolution. None: the budget of the effort.
        step_race: at the end, time whole training steps with the plan and without it, and give
            kernels that do not pay back to torch.

    Raises:
        ConfigError: a value is not allowed; the message lists the allowed ones.
    """

    workspace_limit: int | str | None = _default("workspace_limit")
    total_workspace: int | str | None = _default("total_workspace")
    memory_budget: int | str | None = _default("memory_budget")
    solver: Solver = _default("solver")
    policy: Policy = _default("policy")
    ops: tuple[str, ...] = _default("ops")
    unplanned: Unplanned = _default("unplanned")
    cache: str | None = _default("cache", compare=False)
    backend: Backend = _default("backend")
    device: str | None = _default("device", compare=False)
    device_profile: str | None = _default("device_profile", compare=False)
    deterministic: bool | None = _default("deterministic")
    max_error: float | None = _default("max_error")
    layout: Layout = _default("layout")
    effort: Effort = _default("effort", compare=False)
    time_budget_s: float | None = _default("time_budget_s", compare=False)
    step_race: bool = _default("step_race", compare=False)

    def __post_init__(self) -> None:
        try:
            values = {
                "workspace_limit": settings.size("workspace_limit", self.workspace_limit),
                "total_workspace": settings.size("total_workspace", self.total_workspace),
                "memory_budget": settings.size("memory_budget", self.memory_budget),
                "solver": settings.choice("solver", self.solver, SOLVERS),
                "policy": settings.choice("policy", self.policy, POLICIES),
                "ops": settings.passes(self.ops, OPS),
                "unplanned": settings.choice("unplanned", self.unplanned, UNPLANNED),
                "cache": settings.path("cache", self.cache, "a folder's path"),
                "backend": settings.choice("backend", self.backend, BACKENDS),
                "device_profile": settings.path(
                    "device_profile", self.device_profile, "a file's path"
                ),
                "deterministic": settings.switch("deterministic", self.deterministic, or_none=True),
                "max_error": settings.positive("max_error", self.max_error),
                "layout": settings.choice("layout", self.layout, LAYOUTS),
                "effort": settings.choice("effort", self.effort, EFFORT_NAMES),
                "time_budget_s": settings.positive("time_budget_s", self.time_budget_s),
                "step_race": settings.switch("step_race", self.step_race),
            }
        except ConfigError as error:
            raise self._with_source(error) from error
        for name, value in values.items():
            # The dataclass is frozen; this replaces what was given by its checked form.
            object.__setattr__(self, name, value)
        conflict = settings.conflict(values, OPS)
        if conflict:
            raise ConfigError(conflict)
        if self.device is not None and not isinstance(self.device, str):
            raise ConfigError(f"device must be part of a device's name, got {self.device!r}")

    @property
    def budget_bytes(self) -> int | None:
        """The memory budget in bytes, None for none."""
        assert not isinstance(self.memory_budget, str)
        return self.memory_budget

    def _with_source(self, error: ConfigError) -> ConfigError:
        """The error of a field with the variable that its value is from, if it is from one."""
        # Every message begins with the name of the field.
        name = str(error).partition(" ")[0]
        given = _settings().get(name)
        if given is None or given != getattr(self, name, None):
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
    def switches(self) -> tuple[str, ...]:
        """Names of the demands on a plan that are switched on, for tables.

        >>> Config(deterministic=True).switches
        ('deterministic',)
        """
        return tuple(name.replace("_", "-") for name in _SWITCHES if getattr(self, name))

    @property
    def is_replayed(self) -> bool:
        """True if nothing is measured, because a recording is replayed.

        >>> Config(backend="recorded").is_replayed
        True
        """
        return self.backend == "recorded" or self.device_profile is not None

    def to_dict(self) -> dict[str, Any]:
        """The fields that describe a plan, as JSON values; without the cache folder."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in _OF_THE_PROCESS:
            del values[name]
        return {**values, "ops": list(self.ops)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build a Config from JSON values, without the environment's defaults.

        No file can name a folder to write to: the fields are those of `to_dict` and no others.

        >>> Config.from_dict(Config(policy="all").to_dict()).policy
        'all'

        Raises:
            ConfigError: a field is missing, or is none of a plan.
        """
        known = {item.name for item in fields(cls)} - _OF_THE_PROCESS
        if odd := known ^ set(values):
            raise ConfigError(f"the settings of a plan lack or must not have {min(odd)!r}")
        # Every field is passed, so that no default reads this process's environment.
        return cls(**{**_FALLBACKS, **values})


def require_config(config: object) -> Config:
    """The settings that a public function was given, or the default ones.

    >>> require_config(None) == Config()
    True

    Raises:
        ConfigError: something else was given.
    """
    if config is None:
        return Config()
    if not isinstance(config, Config):
        raise ConfigError(
            f"config must be a ucudnn.Config, such as Config(workspace_limit='64MiB'), got "
            f"{type(config).__name__}"
        )
    return config


def settings_here(config: Config) -> Config:
    """The settings to run a plan by: its own, but for UCUDNN_UNPLANNED where that is set.

    >>> settings_here(Config(unplanned="error")).unplanned
    'error'

    Args:
        config: the plan's settings.
    """
    given = _settings().get("unplanned")
    return config if given is None else replace(config, unplanned=given)


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Settings given by UCUDNN_* variables, by field name.

    >>> read_environment({"UCUDNN_BATCH_SIZE_POLICY": "powerOfTwo"})
    {'policy': 'powers-of-two'}

    Raises:
        ConfigError: a variable of mu-cuDNN (2018) that has no equivalent, or a bad value of one.
    """
    for name, reason in _MUCUDNN_REFUSED.items():
        if name in environment:
            raise ConfigError(f"environment variable {name} is not supported: {reason}")
    found = _of_mucudnn(environment)
    for name in _FALLBACKS:
        value = environment.get(f"UCUDNN_{name.upper()}")
        if value:  # empty counts as unset, as in a shell
            found[name] = value
    return found


def check_environment() -> None:
    """Warn of UCUDNN_* variables that are not settings; refuse mu-cuDNN's without an equivalent.

    >>> check_environment()

    Raises:
        ConfigError: as from `read_environment`.
    """
    _settings()


class Startup(NamedTuple):
    """Files that a process takes part in from its start, without a line of code.

    Args:
        plan: plan to follow, None for none.
        record: table of layers to write the convolutions of the process to, None for none.
    """

    plan: str | None = None
    record: str | None = None

    def __bool__(self) -> bool:
        """True if there is one."""
        return self.plan is not None or self.record is not None


def startup() -> Startup:
    """The files that UCUDNN_PLAN and UCUDNN_RECORD name.

    >>> startup()
    Startup(plan=None, record=None)
    """
    # Empty counts as unset, as for settings.
    return Startup(os.environ.get(_PLAN) or None, os.environ.get(_RECORD) or None)


def set_startup(files: Startup) -> None:
    """Hand files down to the processes that this one starts, and take others away from them."""
    for name, value in ((_PLAN, files.plan), (_RECORD, files.record)):
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def environment_without_startup() -> dict[str, str]:
    """The environment for a process that measures: what it times must be torch's own.

    >>> "UCUDNN_PLAN" in environment_without_startup()
    False
    """
    return {name: value for name, value in os.environ.items() if name not in (_PLAN, _RECORD)}


def ranks_per_device() -> int:
    """Number of processes that share this one's device, as `ucudnn launch` tells them.

    >>> ranks_per_device()
    1

    Raises:
        ConfigError: the variable holds no number above 0.
    """
    text = os.environ.get(RANKS_PER_DEVICE) or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{RANKS_PER_DEVICE} must be a number above 0, got {text!r}")
    return int(text)


def rank_variables(
    ranks_per_device: int, limit_bytes: int | None = None, progress: str | None = None
) -> dict[str, str]:
    """Variables that a launched rank gets from `ucudnn launch`.

    >>> rank_variables(2, limit_bytes=1024)
    {'UCUDNN_RANKS_PER_DEVICE': '2', 'UCUDNN_WORKSPACE_LIMIT': '1024'}

    Args:
        ranks_per_device: number of ranks that share its device.
        limit_bytes: its workspace limit, where the script sets none.
        progress: folder where it counts samples.
    """
    optional = {"UCUDNN_WORKSPACE_LIMIT": limit_bytes, PROGRESS: progress}
    given = {name: str(value) for name, value in optional.items() if value is not None}
    return {RANKS_PER_DEVICE: str(ranks_per_device), **given}


def progress_folder() -> str | None:
    """Folder where ranks count their samples, None outside of a trial.

    >>> progress_folder() is None
    True
    """
    return os.environ.get(PROGRESS)


def share_device(ranks: int) -> None:
    """Note, for this process and those that it starts, how many ranks share its device.

    Args:
        ranks: their number.
    """
    os.environ[RANKS_PER_DEVICE] = str(ranks)


def _settings() -> dict[str, Any]:
    # A sorted tuple is the same key of the cache below as long as no variable changes.
    variables = [item for item in os.environ.items() if item[0].startswith("UCUDNN_")]
    return _settings_from(tuple(sorted(variables)))


# Kept, because every field of every Config asks for it; a mistyped variable is warned of once, and
# again only after a variable has changed.
@lru_cache(maxsize=1)
def _settings_from(variables: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    environment = dict(variables)
    found = read_environment(environment)
    known = {f"UCUDNN_{name.upper()}" for name in _FALLBACKS} | _MUCUDNN_MAPPED
    known |= {_PLAN, _RECORD}
    for name in environment:
        if name not in known and name not in {RANKS_PER_DEVICE, PROGRESS}:
            warn(
                f"environment variable {name} is no setting of ucudnn and has no effect; settings "
                f"are {', '.join(sorted(known))}",
            )
    return found


def _of_mucudnn(environment: Mapping[str, str]) -> dict[str, Any]:
    """Settings given by variables of mu-cuDNN (2018)."""
    found: dict[str, Any] = {
        ours: settings.parse_bytes(environment[name], name)
        for name, ours in _MUCUDNN_BYTES.items()
        if name in environment
    }
    policy = environment.get("UCUDNN_BATCH_SIZE_POLICY")
    if policy is None:
        return found
    if policy not in _MUCUDNN_POLICIES:
        raise ConfigError(
            f"UCUDNN_BATCH_SIZE_POLICY must be one of {', '.join(_MUCUDNN_POLICIES)}, got "
            f"{policy!r}; or set UCUDNN_POLICY to one of {', '.join(POLICIES)}"
        )
    return {**found, "policy": _MUCUDNN_POLICIES[policy]}
