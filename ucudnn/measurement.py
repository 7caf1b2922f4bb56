"""A candidate, and the same timed: the numbers, and all they depend on as a documented key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ucudnn.errors import UcudnnError
from ucudnn.problem import Problem
from ucudnn.units import TOO_LARGE

ROLES = ("alone", "first", "later")
STATUSES = ("ok", "screened", "untimed", "failed")
# Note of a candidate that also adds a bias, in the kernel that computes the convolution.
ADDS_BIAS = "adds bias"
_TYPES = {"str": str, "bool": bool}


def _require_fields(value: Any) -> None:
    """Refuse a dataclass whose strings, numbers and flags are not of the types it declares."""
    for item in fields(value):
        given = getattr(value, item.name)
        if item.type == "int":
            _require_count(item.name, given)
        elif not isinstance(given, _TYPES[str(item.type)]):
            raise UcudnnError(f"{item.name} must be a {item.type}, got {given!r}")


def _require_count(name: str, value: object) -> None:
    if type(value) is not int or not 0 <= value < TOO_LARGE:
        raise UcudnnError(f"{name} must be an int from 0 to 2^63 - 1, got {value!r}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A problem at a micro-batch size together with an algorithm that can compute it.

    >>> c = Candidate(Problem("fprop", 8, 4, 4, (9, 9), (1, 1)), "gemm")
    >>> c.problem.batch, c.workspace_bytes
    (8, None)

    Args:
        problem: the problem at the micro-batch size.
        algorithm: the algorithm's stable name.
        workspace_bytes: temporary memory in bytes, None where only a run can tell.
        notes: facts such as "nondeterministic" or "kernel=onednn".
    """

    problem: Problem
    algorithm: str
    workspace_bytes: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Device:
    """The hardware a time belongs to; one cache file per device.

    Args:
        type: "cpu" or "cuda".
        name: the model, as the processor or driver reports it.
        isa: vector instruction set the framework uses, "" on a GPU.
        cores: physical processors, or streaming multiprocessors on a GPU.
        compute_capability: such as "9.0", "" on a CPU.
        memory_bytes: of a GPU, 0 on a CPU (its size does not change a time).
        power_limit_w: of a GPU, 0 on a CPU.
        mig: the MIG profile of a GPU, "" where there is none.

    Raises:
        UcudnnError: a value of another type, or a negative number.
    """

    type: str
    name: str
    isa: str = ""
    cores: int = 0
    compute_capability: str = ""
    memory_bytes: int = 0
    power_limit_w: int = 0
    mig: str = ""

    def __post_init__(self) -> None:
        _require_fields(self)

    def __str__(self) -> str:
        cores = f"{self.cores} cores" if self.cores else ""
        parts = [self.name, self.isa, cores, self.compute_capability, self.mig]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Software:
    """Versions that decide which kernels exist and how fast they are.

    Args:
        torch: version of PyTorch.
        onednn: version of the oneDNN inside PyTorch, "" where it has none.
        cudnn: version of cuDNN, "" on a CPU.
        cuda: version of the CUDA runtime, "" on a CPU.
        driver: version of the NVIDIA driver, "" on a CPU.

    Raises:
        UcudnnError: a value of another type, or a negative number.
    """

    torch: str
    onednn: str = ""
    cudnn: str = ""
    cuda: str = ""
    driver: str = ""

    def __post_init__(self) -> None:
        _require_fields(self)


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of a run of a candidate.

    Args:
        role: "alone" (the only chunk: returns its result), "first" (of several chunks) or
            "later" (writes into, or adds to, a result that exists).
        threads: intra-operator threads of a CPU, 0 on a GPU.
        allocator: where memory came from, such as "glibc" or "glibc,mmap_threshold=1073741824".
        captured: inside a CUDA graph.
        ranks_per_device: processes that share the device.
        mps_percent: share of a GPU's processors that MPS grants, 100 without MPS.

    Raises:
        UcudnnError: a value of another type, or a negative number.
    """

    role: str = "alone"
    threads: int = 0
    allocator: str = ""
    captured: bool = False
    ranks_per_device: int = 1
    mps_percent: int = 100

    def __post_init__(self) -> None:
        _require_fields(self)
        if self.role not in ROLES:
            raise UcudnnError(f"role must be one of {', '.join(ROLES)}, got {self.role!r}")


@dataclass(frozen=True, slots=True)
class MeasurementKey:
    """Everything a time depends on, and nothing else: no limit, solver, policy or candidate list.

    Args:
        problem: with the micro-batch as its batch.
        algorithm: the stable name.
        device: the hardware.
        software: the versions.
        conditions: how it was run.
        protocol: version number of the timing loop.
    """

    problem: Problem
    algorithm: str
    device: Device
    software: Software
    conditions: Conditions
    protocol: int


# How the note begins that a backend's `state` adds where others used the processors.
_PERTURBED = "load="


def is_perturbation(note: str) -> bool:
    """True if a note says that others used the processors meanwhile.

    >>> is_perturbation("load=1.5"), is_perturbation("kernel=onednn")
    (True, False)
    """
    return note.startswith(_PERTURBED)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Result of a run of one candidate; failure is a status, not an exception.

    Args:
        key: what the numbers depend on.
        status: "ok" (timed in full), "screened" (one sample, too slow to go on), "untimed"
            (run once for its workspace, which was over the limit) or "failed".
        time_ns: median over `samples`, time of one chunk; None where it was not timed.
        spread_ns: interquartile range of `samples`.
        samples: times of one chunk in ns, in the order taken.
        workspace_bytes: peak that the allocator saw beyond the result; None where it failed.
        error: relative error (L2) against a float64 reference, None where it was not measured.
        reason: why it failed, else "".
        notes: such as "kernel=onednn", the kernel that the framework picked.

    Raises:
        UcudnnError: an unknown status, a time that does not go with it, or a negative number.
    """

    key: MeasurementKey
    status: str
    time_ns: int | None = None
    spread_ns: int | None = None
    samples: tuple[int, ...] = ()
    workspace_bytes: int | None = None
    error: float | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_perturbed(self) -> bool:
        """True where others used the processors while it was timed."""
        return any(map(is_perturbation, self.notes))

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise UcudnnError(f"status must be one of {', '.join(STATUSES)}, got {self.status!r}")
        if (self.time_ns is not None) != (self.status in ("ok", "screened")):
            raise UcudnnError(f"time_ns={self.time_ns} does not go with status {self.status!r}")
        numbers = (self.time_ns or 0, self.spread_ns or 0, self.workspace_bytes or 0)
        if min(*numbers, *self.samples) < 0:
            raise UcudnnError(f"times and workspaces must not be negative, got {self}")


@dataclass(frozen=True, slots=True)
class Origin:
    """How a plan came about, for whoever finds its file; no part of what it decides.

    >>> Origin.from_dict({"model": "net.py:net", "of a later version": 1}).model
    'net.py:net'

    Args:
        model: its class, or its name on the command line; "" where layers were tuned without one.
        inputs: shapes and dtypes, such as "8x3x224x224 float32".
        made: date and time in UTC, as 2026-01-31T12:00:00Z.
        ucudnn: version of this package.
        protocol: number of the way in which times were taken.
        effort: setting.
        budget: seconds that tuning might take, "" without an end.
        seconds: that it took, rounded.
        load: of the machine at the end: processes that were ready to run, on average of a minute.
        left_out: kernels without a plan, because the time was over before they had one.
        over_limit: kernels without a plan, because nothing fits the workspace limit.

    Raises:
        UcudnnError: a value of another type.
    """

    model: str = ""
    inputs: tuple[str, ...] = ()
    made: str = ""
    ucudnn: str = ""
    protocol: int = 0
    effort: str = ""
    budget: str = ""
    seconds: int = 0
    load: str = ""
    left_out: tuple[str, ...] = ()
    over_limit: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for item in fields(self):
            given = getattr(self, item.name)
            if item.type == "int":
                _require_count(item.name, given)
            elif item.type != "str":
                # JSON has lists.
                if not isinstance(given, (tuple, list)) or not all(map(_is_text, given)):
                    raise UcudnnError(f"{item.name} must hold strings, got {given!r}")
                object.__setattr__(self, item.name, tuple(given))
            elif not _is_text(given):
                raise UcudnnError(f"{item.name} must be a str, got {given!r}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Origin:
        """Read it from JSON values, of which those of later versions are ignored."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def __str__(self) -> str:
        about = [self.model, *(f"on {text}" for text in self.inputs), f"made {self.made}"]
        with_what = f"ucudnn {self.ucudnn}, protocol {self.protocol}, effort {self.effort}"
        took = f"tuned in {self.seconds} s" + (f" of {self.budget} s" if self.budget else "")
        return ", ".join(filter(None, [*about, with_what, took, f"load {self.load}"]))


def _is_text(value: object) -> bool:
    return isinstance(value, str)
