"""Candidates and measurements: what was measured, and the key of all that a time depends on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ucudnn.errors import UcudnnError
from ucudnn.problem import Problem
from ucudnn.split import DEFAULT_ALGORITHM, Split, Timing
from ucudnn.units import Count

STATUSES = ("ok", "screened", "untimed", "failed")
_SAYING_MORE = ("untimed", "screened", "ok")


class FailureKind(StrEnum):
    """Kind of a candidate's failure; `Measurement.reason` says more, for people.

    Attributes:
        OUT_OF_MEMORY: there was too little memory; at another time there may be enough.
        CRASH: the candidate ended its process, or the process can no longer use the device.
        HANG: the candidate did not end in time.
        WRONG: the candidate computed another result than the convolution has.
        ERROR: the candidate raised another error.
    """

    OUT_OF_MEMORY = "out of memory"
    CRASH = "crash"
    HANG = "hang"
    WRONG = "wrong"
    ERROR = "error"


class Subject(StrEnum):
    """Subject of a measurement: what was timed.

    Attributes:
        CHUNK: a candidate, in one role.
        FIRST_RUN: the first run of a candidate. Its time is kept apart from the candidate's later,
            more precise times.
        CALL: a whole call by one split (`MeasurementKey.split`), in a race with other splits.
        OPERATIONS: 10^12 operations at the machine's peak rate, in the dtype of the problem.
        TRAFFIC: moving 10^12 bytes at the machine's peak rate; `workspace_bytes` is the size of the
            machine's caches.
    """

    CHUNK = "chunk"
    FIRST_RUN = "first run"
    CALL = "call"
    OPERATIONS = "operations"
    TRAFFIC = "traffic"


class Role(StrEnum):
    """Role of a chunk in a split: its position, and what its call does with the result.

    Attributes:
        ALONE: the only chunk; its call returns the result. The first of several chunks may have
            this role, too, if it is computed by such a call (see `role_of`).
        FIRST: the first of several chunks; its call begins a sum in float32, to which later chunks
            are added.
        LATER: any other chunk; its call writes into, or adds to, an existing result.
    """

    ALONE = "alone"
    FIRST = "first"
    LATER = "later"


def role_of(problem: Problem, position: Role) -> Role:
    """The role in which a chunk at a position of a split is computed, and therefore timed.

    >>> role_of(Problem("fprop", 8, 4, 4, (9, 9), (3, 3)), Role.FIRST)
    <Role.LATER: 'later'>
    """
    if position != Role.FIRST:
        return position
    # Each chunk of fprop and dgrad, even the first, is written into its own part of the result.
    if problem.op != "wgrad":
        return Role.LATER
    # In half precision the first chunk begins a sum in float32. In full precision the first chunk
    # is an ordinary call, and the later chunks are added to its result.
    return Role.ALONE if problem.bytes_per_element >= 4 else Role.FIRST


def positions(chunks: int) -> tuple[Role, ...]:
    """Positions of the chunks of a split, in order.

    >>> [str(position) for position in positions(3)]
    ['first', 'later', 'later']
    """
    return (Role.ALONE,) if chunks == 1 else (Role.FIRST, *[Role.LATER] * (chunks - 1))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A problem at a micro-batch size together with an algorithm that can compute it.

    >>> c = Candidate(Problem("fprop", 8, 4, 4, (9, 9), (1, 1)), "gemm")
    >>> c.problem.batch, c.workspace_bytes
    (8, None)

    Args:
        problem: the problem at the micro-batch size.
        algorithm: the algorithm's stable name.
        workspace_bytes: temporary memory in bytes; None if it is not known before a run.
        notes: further remarks, for people.
        implementation: what the library runs, such as "onednn"; "" if the algorithm's name says it.
        is_deterministic: whether it computes the same bits each time.
        adds_bias: whether it also adds the bias of the layer, as a part of computing the
            convolution.
    """

    problem: Problem
    algorithm: str
    workspace_bytes: int | None = None
    notes: tuple[str, ...] = ()
    implementation: str = ""
    is_deterministic: bool = True
    adds_bias: bool = False


@dataclass(frozen=True, slots=True)
class Device:
    """The hardware on which a time was measured; measurements are kept per device.

    Args:
        type: "cpu" or "cuda".
        name: the model, as the processor or driver reports it.
        isa: vector instruction set that torch uses, "" on a GPU.
        cores: number of physical processors, or of streaming multiprocessors on a GPU.
        compute_capability: such as "9.0", "" on a CPU.
        memory_bytes: memory of a GPU; 0 on a CPU, where the size of the memory changes no time.
        power_limit_w: power limit of a GPU in watts; 0 on a CPU.
        mig: the MIG profile of a GPU, "" if there is none.
    """

    type: str
    name: str
    isa: str = ""
    cores: Count = 0
    compute_capability: str = ""
    memory_bytes: Count = 0
    power_limit_w: Count = 0
    mig: str = ""

    def __str__(self) -> str:
        cores = f"{self.cores} cores" if self.cores else ""
        parts = [self.name, self.isa, cores, self.compute_capability, self.mig]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Software:
    """Versions of the software that decides which algorithms exist and how fast they are.

    Args:
        torch: version of PyTorch.
        onednn: version of the oneDNN inside PyTorch, "" if it has none.
        cudnn: version of cuDNN, "" on a CPU.
        cuda: version of the CUDA runtime, "" on a CPU.
        driver: version of the NVIDIA driver, "" on a CPU.
    """

    torch: str
    onednn: str = ""
    cudnn: str = ""
    cuda: str = ""
    driver: str = ""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions under which a candidate is run.

    Args:
        role: role of the chunk in its call.
        threads: torch's intra-operator threads on a CPU, 0 on a GPU.
        allocator: name of the memory allocator, such as "glibc" or
            "glibc,mmap_threshold=1073741824".
        ranks_per_device: number of ranks that share the device.
        mps_percent: share of a GPU's processors that MPS grants; 100 for a process that has the
            GPU to itself, 0 if several processes take turns on the GPU without MPS.
    """

    role: Role = Role.ALONE
    threads: Count = 0
    allocator: str = ""
    ranks_per_device: Count = 1
    mps_percent: Count = 100


@dataclass(frozen=True, slots=True)
class MeasurementKey:
    """Everything a time depends on, and nothing else: no limit, solver, policy or candidate list.

    Args:
        problem: the problem, with the micro-batch size as its batch.
        algorithm: stable name of the algorithm; "" if the subject is no candidate.
        device: the hardware.
        software: versions of the software.
        conditions: conditions of the run.
        protocol: version number of the timing loop.
        subject: what was timed.
        split: split of a whole call; None for other subjects.
        race: identity of the race in which a whole call was timed; "" for other subjects. Only
            samples of the same race can be compared in pairs.

    Raises:
        UcudnnError: the subject does not go with the algorithm or the split.
    """

    problem: Problem
    algorithm: str
    device: Device
    software: Software
    conditions: Conditions
    protocol: Count
    subject: Subject = Subject.CHUNK
    split: Split | None = None
    race: str = ""

    @property
    def is_default(self) -> bool:
        """True if torch's own convolution was timed, as a candidate."""
        return self.algorithm == DEFAULT_ALGORITHM

    def __post_init__(self) -> None:
        has_algorithm = self.subject in (Subject.CHUNK, Subject.FIRST_RUN)
        is_call = self.subject is Subject.CALL
        if (self.algorithm and not has_algorithm) or (self.split is not None) != is_call:
            raise UcudnnError(
                f"algorithm={self.algorithm!r} and split={self.split} do not go with a measurement "
                f"of a {self.subject}"
            )


@dataclass(frozen=True, slots=True)
class Measurement:
    """Result of measuring one candidate; a failure is a status, not an exception.

    Args:
        key: what the numbers depend on.
        status: "ok" (timed in full), "screened" (timed, but eliminated or not raced yet), "untimed"
            (run once for its workspace, which was over the limit) or "failed".
        time_ns: time of one chunk, the median of `samples`; None if it was not timed.
        spread_ns: interquartile range of `samples`.
        samples: times of one chunk in ns, in the order taken.
        workspace_bytes: the most memory that was allocated during the run, beyond the result; None
            if the candidate failed.
        error: relative error (L2) against a float64 reference; None if it was not measured.
        reason: why the candidate failed, for people; "" if it did not fail.
        notes: further remarks, for people, such as "throttled=power".
        failure: kind of the failure; None if the candidate did not fail, or if the kind is not
            known.
        lost_to: the fastest of the algorithms that the candidate lost its race to; "": it did not.
        implementation: as in `Candidate`.
        is_deterministic: as in `Candidate`.
        adds_bias: as in `Candidate`.
        load: number of processors that other processes used meanwhile; 0 if enough were left for
            this process.

    Raises:
        UcudnnError: an unknown status, a time that does not go with the status, or a negative
            number.
    """

    key: MeasurementKey
    status: str
    time_ns: Count | None = None
    spread_ns: Count | None = None
    samples: tuple[Count, ...] = ()
    workspace_bytes: Count | None = None
    error: float | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()
    failure: FailureKind | None = None
    lost_to: str = ""
    implementation: str = ""
    is_deterministic: bool = True
    adds_bias: bool = False
    load: float = 0.0

    @property
    def timing(self) -> Timing | None:
        """Time, spread and workspace; None if the time or the workspace is not known."""
        if self.time_ns is None or self.workspace_bytes is None:
            return None
        # Some recordings have a time without its samples, which was measured at least once.
        samples = len(self.samples) or 1
        return Timing(self.time_ns, self.spread_ns or 0, self.workspace_bytes, samples)

    @property
    def is_perturbed(self) -> bool:
        """True if other processes used processors that this process needed while it measured."""
        return self.load > 0

    def may_replace(self, known: Measurement) -> bool:
        """True if a cache may store this in place of `known`, a measurement with the same key.

        A measurement under load may not replace one without load, unless its status says something
        new.
        """
        if known.is_perturbed or not self.is_perturbed:
            return True
        # A candidate that fails now and did not before, or the reverse, always replaces `known`.
        if "failed" in (self.status, known.status):
            return self.status != known.status
        return _SAYING_MORE.index(self.status) > _SAYING_MORE.index(known.status)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise UcudnnError(f"status must be one of {', '.join(STATUSES)}, got {self.status!r}")
        if (self.time_ns is not None) != (self.status in ("ok", "screened")):
            raise UcudnnError(f"time_ns={self.time_ns} does not go with status {self.status!r}")
        numbers = (self.time_ns or 0, self.spread_ns or 0, self.workspace_bytes or 0)
        if min(*numbers, *self.samples) < 0:
            raise UcudnnError(f"times and workspaces must not be negative, got {self}")
