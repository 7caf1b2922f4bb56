"""The contract between hardware and everything else: enumerate candidates, build, run, identify."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ucudnn.measurement import Candidate, Conditions, Device, Software
from ucudnn.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor


class Executable(ABC):
    """A built candidate: the one object that both the benchmark and training run.

    Operands are (x, w) for fprop, (dy, w) for dgrad and (x, dy) for wgrad. The number of samples
    is that of the operands. Law: `write` leaves in `out` what `alone` returns, `begin` returns it,
    `add` adds it; with a bias it is added to every channel of what `alone` and `write` compute.
    """

    @abstractmethod
    def alone(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute the result of these operands into a new tensor."""

    def write(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Compute into a slice of an existing result (fprop, dgrad)."""
        out.copy_(self.alone(a, b))

    def alone_biased(self, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        """Compute the result plus a bias of one element per channel (fprop, dgrad)."""
        return add_bias(self.alone(a, b), bias)

    def write_biased(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor) -> None:
        """Compute that into a slice of an existing result (fprop, dgrad)."""
        self.write(a, b, out)
        add_bias(out, bias)

    def begin(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute a new result that others are added to: half precision as float32 (wgrad)."""
        result = self.alone(a, b)
        return result.float() if result.dtype.itemsize < 4 else result

    def add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Add to an existing result, in its precision (wgrad)."""
        out.add_(self.alone(a, b))


def add_bias(result: Tensor, bias: Tensor) -> Tensor:
    """Add one element of the bias to each channel of a result, in place."""
    return result.add_(bias.view(-1, *[1] * (result.dim() - 2)))


class Activity(NamedTuple):
    """Processor time of a process until some moment.

    Args:
        clock_ns: the moment.
        processor_ns: processor time of all its threads.
        switches: how often it was taken off a processor.
    """

    clock_ns: int
    processor_ns: int
    switches: int


class Cost(NamedTuple):
    """The least that a candidate does, whatever implementation a library picks for it.

    Args:
        operations: floating-point operations; a multiply-add is two.
        traffic_bytes: bytes read from and written to memory: operands, result, and temporaries
            that hold the whole chunk, once per pass over them.
        workspace_bytes: temporary memory at the same time, beyond the result.
    """

    operations: int
    traffic_bytes: int
    workspace_bytes: int


class Roofline(NamedTuple):
    """The fastest that a machine computes and moves data, which bounds times from below.

    Source: Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance Model for
    Multicore Architectures" (CACM 52(4), 2009).

    >>> roofline = Roofline(operations_per_s=1e9, bytes_per_s=1e8, cached_bytes=400)
    >>> roofline.time_ns(Cost(2000, 500, 0)), roofline.time_ns(Cost(2000, 1000, 0))
    (2000, 6000)

    Args:
        operations_per_s: floating-point operations per second, of all processors in use together.
        bytes_per_s: bytes read from and written to memory per second.
        cached_bytes: traffic of one candidate that caches may keep from memory.
    """

    operations_per_s: float
    bytes_per_s: float
    cached_bytes: int = 0

    def time_ns(self, cost: Cost) -> int:
        """The shortest time in which a cost can be met.

        A caller that extrapolates from one batch to a larger one by the ratio of two such times
        must not take more than the ratio of the batches: caches serve the smaller one better.
        """
        computing = cost.operations / self.operations_per_s
        moving = max(0, cost.traffic_bytes - self.cached_bytes) / self.bytes_per_s
        return int(1e9 * max(computing, moving))


class AbstractBackend(ABC):
    """Convolution algorithms of one kind of device.

    Args:
        name: of the backend.
        in_worker: whether candidates are measured in a process of their own, which one of them may
            crash; the backend must then be picklable.
        candidate_timeout_s: how long a run of one candidate may take there.
    """

    name: str
    in_worker: bool = False
    candidate_timeout_s: float = 120.0

    @abstractmethod
    def device(self) -> Device:
        """The device this process would use."""

    @abstractmethod
    def software(self) -> Software:
        """Versions that decide which kernels exist."""

    @abstractmethod
    def conditions(self, role: str = "alone") -> Conditions:
        """Conditions under which a candidate would run in this process now."""

    @abstractmethod
    def algorithms(self) -> tuple[str, ...]:
        """Names of all algorithms, torch's own first."""

    @abstractmethod
    def refusal(self, problem: Problem, algorithm: str) -> str | None:
        """Reason why an algorithm does not compute a problem, as a clause; None where it does."""

    def slab_refusal(self, problem: Problem, algorithm: str) -> str | None:
        """Reason why an algorithm does not compute a slab, as a clause; None where it does.

        torch's own convolution may be refused here: of a whole problem it is what torch computes,
        right or wrong, but torch is never given a slab.
        """
        return self.refusal(problem, algorithm)

    @abstractmethod
    def candidates(self, problem: Problem) -> tuple[Candidate, ...]:
        """The distinct candidates of a problem, torch's own first.

        Raises:
            UnsupportedError: no algorithm computes the problem.
        """

    def bias_candidates(self, problem: Problem) -> tuple[Candidate, ...]:
        """Candidates that compute a convolution and add a bias at once, where others take two runs.

        With a bias of zeros they compute the convolution alone, too. Noted `candidate.ADDS_BIAS`.
        """
        del problem
        return ()

    @abstractmethod
    def kernel(self, problem: Problem, algorithm: str) -> str:
        """Name of the kernel that an algorithm runs a problem by; it may depend on the batch."""

    def cost(self, problem: Problem, algorithm: str) -> Cost | None:
        """The least that a candidate does; None where nothing is known of it."""
        del problem, algorithm
        return None

    blocks_host: bool = False
    """Whether a call returns when its result is computed, so that what surrounds it takes time."""

    def roofline(self, dtype: str) -> Roofline | None:
        """The fastest that this process can compute in a dtype; None where it is not known."""
        del dtype
        return None

    @abstractmethod
    def executable(self, problem: Problem, algorithm: str) -> Executable:
        """Build a candidate.

        Raises:
            UnsupportedError: the algorithm does not compute the problem.
        """

    def build_refusal(self, problem: Problem, algorithm: str) -> str | None:
        """Reason why a candidate cannot be run, where only building it tells; None where it can."""
        del problem, algorithm
        return None

    @abstractmethod
    def operands(self, problem: Problem, samples: int) -> tuple[Tensor, Tensor]:
        """Random operands in the problem's dtype and layout, with this many samples."""

    @abstractmethod
    def workspace_bytes(
        self, run: Callable[[], Tensor | None], parts: Iterable[tuple[Problem, str]]
    ) -> int:
        """Run once and return the peak of temporary memory in bytes, beyond the returned tensor.

        Args:
            run: the call.
            parts: each (problem at its chunk's batch, algorithm) that the call runs.
        """

    @abstractmethod
    def elapsed_ns(self, run: Callable[[], object]) -> int:
        """Run once and return the time it took on the device, in nanoseconds."""

    def is_broken(self) -> bool:
        """True if a failure has left the device useless to this process, and to it alone."""
        return False

    def state(self) -> tuple[str, ...]:
        """External conditions that may perturb times now: clocks, heat, other processes.

        As notes of a measurement, "throttled=..." among them where the device slows itself down.
        """
        return ()

    def activity(self) -> Activity | None:
        """Processor time of this process so far; None where times do not depend on it."""
        return None

    def wave_sizes(self, problem: Problem) -> tuple[int, ...]:
        """Batches up to the problem's that keep all processors equally busy; () for no idea."""
        del problem
        return ()

    @abstractmethod
    def cache_bytes(self) -> int:
        """Size of the last-level cache, which a steady-state benchmark must exceed."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Memory that a benchmark may use without disturbing the machine."""
