"""The contract of backends: enumerate candidates, build and run them, identify the device.

Everything that depends on hardware is behind these methods. Methods that are not abstract have a
default that is safe for every backend: for example, `cost` returns None.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from ucudnn.backends.tensors import Slices
    from ucudnn.measurement import Candidate, Conditions, Device, Software
    from ucudnn.problem import Problem


# An executable is built once per (problem, algorithm) and called in every training step. So costly
# preparation is done once: in the constructor, or at the first call with operands of a layout.
class Executable(ABC):
    """A built candidate: the object that both the benchmark and training run.

    Operands are (x, w) for fprop, (dy, w) for dgrad and (x, dy) for wgrad; their first axis gives
    the number of samples. All methods compute the same result. `alone` and `begin` return it,
    `write` stores it into `out`, and `add` adds it to `out`. If there is a bias (fprop, dgrad), one
    element of it is added to each channel.
    """

    @abstractmethod
    def alone(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the result of these operands into a new tensor in the problem's layout."""

    # The methods below are correct for any algorithm, but they compute a temporary result first. An
    # algorithm that can write or add into `out` directly overrides them.
    def write(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """Compute into a slice of an existing result (fprop, dgrad)."""
        out.copy_(self.alone(a, b, bias))

    def begin(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute a new result, to which chunks are added; float32 for half precision (wgrad)."""
        result = self.alone(a, b)
        # A sum in half precision would be rounded after every chunk, and the errors would add up.
        return result.float() if result.dtype.itemsize < 4 else result

    def add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Add the result to an existing tensor, in the precision of that tensor (wgrad)."""
        out.add_(self.alone(a, b))


def add_bias(result: Tensor, bias: Tensor | None) -> Tensor:
    """Add one element of the bias, if there is one, to each channel of a result, in place."""
    if bias is None:
        return result
    # Channels are the second axis in either layout: nhwc is the same shape with other strides.
    return result.add_(bias.view(-1, *[1] * (result.dim() - 2)))


@dataclass(frozen=True, slots=True)
class BoundChunk:
    """A chunk of a split: its problem, its executable, and its slices of the whole tensors."""

    problem: Problem | None  # None if the result is zero for any operands
    algorithm: str
    executable: Executable
    a: Slices  # of the first operand: x for fprop and wgrad, dy for dgrad
    b: Slices  # of the second operand: w for fprop and dgrad, dy for wgrad
    out: Slices


class Launcher(Protocol):
    """Computes all chunks of a call with fewer steps on the host than one chunk after the other."""

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor | None:
        """The result; None if the chunks must be computed one by one this time."""
        ...


class Elapsed(NamedTuple):
    """Times of a run, in nanoseconds; where a run blocks the host, both are the same.

    Args:
        device_ns: time in which the device computes it.
        host_ns: time in which the host launches it.
    """

    device_ns: int
    host_ns: int


class Activity(NamedTuple):
    """CPU time that a process has used up to some moment.

    Args:
        clock_ns: the moment.
        processor_ns: CPU time of all threads of the process.
        switches: involuntary context switches of the process.
    """

    clock_ns: int
    processor_ns: int
    switches: int


class DeviceState(NamedTuple):
    """State of a device that may perturb times.

    Args:
        load: number of processors that others use; 0 if they leave enough for this process.
        notes: further facts, such as clocks and temperature, for people to read.
    """

    load: float = 0.0
    notes: tuple[str, ...] = ()


class Cost(NamedTuple):
    """Lower bounds of the operations, traffic and workspace of a candidate.

    They hold for every implementation that a library may pick.

    Args:
        operations: floating-point operations; a multiply-add is two.
        traffic_bytes: bytes read from and written to memory in all passes over operands, result,
            and temporaries that hold the whole chunk.
        workspace_bytes: peak of temporary memory, beyond the result.
    """

    operations: int
    traffic_bytes: int
    workspace_bytes: int


class Roofline(NamedTuple):
    """Peak rates of a machine, from which a lower bound of a candidate's time follows.

    Source: Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance Model for
    Multicore Architectures" (CACM 52(4), 2009).

    >>> roofline = Roofline(operations_per_s=1e9, bytes_per_s=1e8, cached_bytes=400)
    >>> roofline.time_ns(Cost(2000, 500, 0)), roofline.time_ns(Cost(2000, 1000, 0))
    (2000, 6000)

    Args:
        operations_per_s: floating-point operations per second, on all cores in use together.
        bytes_per_s: bytes read from and written to memory per second.
        cached_bytes: bytes of one candidate's traffic that caches may absorb.
    """

    operations_per_s: float
    bytes_per_s: float
    cached_bytes: int = 0

    def time_ns(self, cost: Cost) -> int:
        """Lower bound of the time of a candidate with this cost on this machine.

        The bounds of two batches may differ by a larger factor than the batches do, because caches
        absorb a larger share of the traffic of the smaller batch. A caller that extrapolates by the
        ratio of two bounds must limit this ratio to that of the batches.
        """
        # At best, arithmetic and memory traffic overlap completely. Then the longer of the two is
        # the time.
        computing = cost.operations / self.operations_per_s
        # Traffic that a cache absorbs may take no time at all, so a lower bound must not count it.
        moving = max(0, cost.traffic_bytes - self.cached_bytes) / self.bytes_per_s
        return int(1e9 * max(computing, moving))


class Span(NamedTuple):
    """Memory that a part of a run allocates, beyond what was allocated when the run began.

    Args:
        peak_bytes: largest amount at any moment of the part.
        end_bytes: amount at its end; negative if memory from before the run was freed.
    """

    peak_bytes: int
    end_bytes: int


class AbstractBackend(ABC):
    """Convolution algorithms of one kind of device.

    Args:
        name: name of the backend in the registry and in plan files.
        in_worker: whether candidates are measured in a process of their own, because one may crash;
            the backend must then be picklable.
        candidate_timeout_s: longest time in seconds that the process may measure without a message.
    """

    name: str
    in_worker: bool = False
    candidate_timeout_s: float = 120.0

    @abstractmethod
    def device(self) -> Device:
        """The device on which this process would run convolutions."""

    @abstractmethod
    def software(self) -> Software:
        """Versions of the libraries, which decide what algorithms exist and how fast they are."""

    @abstractmethod
    def conditions(self) -> Conditions:
        """Conditions under which a call of one chunk would run in this process now."""

    @abstractmethod
    def refusal(self, problem: Problem, algorithm: str) -> str | None:
        """Reason why an algorithm does not compute a problem, as a clause; None if it does."""

    def slab_refusal(self, problem: Problem, algorithm: str) -> str | None:
        """Reason why an algorithm does not compute a slab, as a clause; None if it does.

        This may refuse more than `refusal`. If torch's own convolution has a fault at some shapes,
        whole problems of these shapes are not refused, because torch computes them without a plan,
        too. Slabs of these shapes are refused, because without a plan torch computes no slabs.
        """
        return self.refusal(problem, algorithm)

    # Candidates with a bias are listed separately, because cuDNN has other engines for the
    # convolution with a fused bias than for the plain convolution.
    @abstractmethod
    def candidates(self, problem: Problem, adds_bias: bool = False) -> tuple[Candidate, ...]:
        """The distinct candidates of a problem, torch's own convolution first.

        With `adds_bias`, these are the candidates that compute a convolution and add a bias in one
        operation. With a bias of zeros, they compute the plain convolution.

        Raises:
            UnsupportedError: no algorithm computes the problem.
        """

    def implementation_of(self, problem: Problem, algorithm: str) -> str:
        """Name of the implementation that an algorithm runs at the batch of this problem."""
        del problem
        return algorithm

    # Lower bounds allow candidates to be ruled out without a run. Candidates without bounds are
    # timed.
    def cost(self, problem: Problem, algorithm: str) -> Cost | None:
        """Lower bounds of a candidate's operations, traffic and workspace; None if unknown."""
        del problem, algorithm
        return None

    # False on GPUs, where a call returns early and host code runs while the GPU computes.
    blocks_host: bool = False
    """True if a call returns only when its result is computed; host code then adds to its time."""

    def roofline(self, dtype: str) -> Roofline | None:
        """Peak rates of this process in a dtype; None if they are not known."""
        del dtype
        return None

    @abstractmethod
    def executable(self, problem: Problem, algorithm: str) -> Executable:
        """Build a candidate.

        Raises:
            UnsupportedError: the algorithm does not compute the problem.
        """

    def launcher(self, problem: Problem, chunks: Sequence[BoundChunk]) -> Launcher | None:
        """A faster way to compute all chunks of a problem; None if there is none."""
        del problem, chunks
        return None

    # This is not part of `refusal`, which is called for every batch size and so must not build
    # anything.
    def build_refusal(self, problem: Problem, algorithm: str) -> str | None:
        """Reason why a candidate cannot run, found by building it; None if it can run."""
        del problem, algorithm
        return None

    @abstractmethod
    def operands(self, problem: Problem, samples: int) -> tuple[Tensor, Tensor]:
        """Random operands in the problem's dtype and layout, with this many samples."""

    @abstractmethod
    # Workspace is measured, because torch's own convolution does not report what it allocates.
    def workspace_bytes(
        self, run: Callable[[], Tensor | None], parts: Iterable[tuple[Problem, str]]
    ) -> int:
        """Run and return the peak of temporary memory in bytes, beyond the returned tensor.

        Args:
            run: the call.
            parts: pairs (problem at the batch of a chunk, algorithm), for all chunks of the call.
        """

    # This method measures the peaks of whole steps and of single operators.
    def span(self, run: Callable[[], object]) -> Span:
        """Run once and return the memory that it allocates; zeros if that is not counted."""
        run()
        return Span(0, 0)

    # The allocator counts each size rounded up to a multiple of this.
    rounding_bytes = 1

    def allocated_bytes(self) -> int:
        """Bytes that this process has allocated on the device now; 0 if they are not counted."""
        return 0

    @abstractmethod
    def elapsed_ns(self, run: Callable[[], object]) -> int:
        """Run once and return the time that it took on the device, in nanoseconds."""

    # Kernels are ranked by the time of the device alone, because in a step, other kernels may hide
    # what the host takes to launch them. Steps are judged by `elapsed_ns`, which has both.
    def elapsed_apart(self, run: Callable[[], object], lead_ns: int) -> Elapsed:
        """Run once and return the times of the device and of the host, each without the other.

        Args:
            run: what is timed.
            lead_ns: about how far ahead the host must begin, so that the device never waits for
                it, in nanoseconds; 0 if unknown.
        """
        del lead_ns
        elapsed_ns = self.elapsed_ns(run)
        return Elapsed(elapsed_ns, elapsed_ns)

    # A CUDA error such as an illegal address makes every later call of the process fail.
    def is_broken(self) -> bool:
        """True if a failure has left the device unusable in this process, but not in others."""
        return False

    def state(self) -> DeviceState:
        """State of the device that may perturb times: other processes, clocks, temperature."""
        return DeviceState()

    def activity(self) -> Activity | None:
        """CPU time of this process so far; None if times on the device do not depend on it."""
        return None

    @abstractmethod
    def cache_bytes(self) -> int:
        """Size of the last-level cache; the operands of a benchmark must be larger."""

    @abstractmethod
    def available_bytes(self) -> int:
        """Bytes that this process can still allocate on the device; 0 if it allocates nothing."""

    def memory_bytes(self) -> int:
        """Bytes that the operands of a benchmark may take, and as many again its workspace."""
        return self.available_bytes() // 2
