"""The CPU backend: list and build algorithms, and measure memory and time in this process."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ucudnn.backends._base import (
    AbstractBackend,
    Activity,
    Cost,
    DeviceState,
    Executable,
    Roofline,
    Span,
)
from ucudnn.backends.tensors import repeat_into
from ucudnn.backends.torch_cpu import processor
from ucudnn.backends.torch_cpu.algorithm import ONEDNN_KERNELS, empty
from ucudnn.backends.torch_cpu.diagonal import DiagonalGemm
from ucudnn.backends.torch_cpu.fft import Fft
from ucudnn.backends.torch_cpu.gemm import Gemm, Im2colGemm
from ucudnn.backends.torch_cpu.operators import (
    OneDnn,
    OneDnnFloat32,
    OneDnnNhwc,
    SlowConv2d,
    TorchDefault,
    chosen_kernel,
    cramped_refusal,
)
from ucudnn.backends.torch_cpu.phases import Phases
from ucudnn.backends.torch_cpu.processor import LoadMeter, describe_allocator, roofline
from ucudnn.backends.torch_cpu.workspace import allocated, allocated_peak_bytes, unseen_bytes
from ucudnn.config import ranks_per_device
from ucudnn.errors import UnsupportedError
from ucudnn.measurement import Candidate, Conditions, Device, Software
from ucudnn.problem import Problem

# An operand is filled by repeating this many random values. The number is a prime, so that no two
# samples, channels or rows begin at the same value.
_DRAWN = 262_139
# Candidates are listed in this order. The first, torch's own convolution, is the baseline.
ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        TorchDefault(),
        OneDnn(),
        OneDnnNhwc(),
        OneDnnFloat32(),
        SlowConv2d(),
        Im2colGemm(),
        Gemm(),
        Fft(),
        Phases(),
        DiagonalGemm(),
    )
}


# There is one meter per process: the load is computed from the change of counters since the meter
# was last read.
_load = LoadMeter()


class TorchCpuBackend(AbstractBackend):
    """Convolution algorithms made of PyTorch's CPU operators.

    >>> backend = TorchCpuBackend()
    >>> problem = Problem("fprop", 32, 64, 64, (56, 56), (3, 3), padding=((1, 1), (1, 1)))
    >>> [candidate.algorithm for candidate in backend.candidates(problem)]
    ['torch_default', 'onednn_nhwc', 'slow_conv2d', 'im2col_gemm', 'fft']
    """

    name = "torch_cpu"
    blocks_host = True

    def device(self) -> Device:
        return processor.cpu_device()

    def software(self) -> Software:
        return processor.cpu_software()

    def conditions(self) -> Conditions:
        return Conditions(
            threads=torch.get_num_threads(),
            allocator=describe_allocator(),
            ranks_per_device=ranks_per_device(),
        )

    def refusal(self, problem: Problem, algorithm: str) -> str | None:
        # The only other math is TF32, a number format of NVIDIA's tensor cores.
        if problem.math != "strict":
            return "a CPU computes float32 in full precision; use math='strict'"
        if problem.layout == "nhwc" and problem.rank == 1:
            return "torch has no channels-last layout for 1-D tensors; use layout='nchw'"
        if algorithm not in ALGORITHMS:
            return f"there is none of that name; known are {', '.join(ALGORITHMS)}"
        return ALGORITHMS[algorithm].refusal(problem)

    def slab_refusal(self, problem: Problem, algorithm: str) -> str | None:
        reason = self.refusal(problem, algorithm)
        # A slab has few rows, so that a filter may reach beyond it. Then oneDNN's half-precision
        # kernels read memory outside the operands. For a whole problem, torch's own convolution is
        # not refused for that reason.
        if reason is None and self.implementation_of(problem, algorithm) in ONEDNN_KERNELS:
            reason = cramped_refusal(problem)
        return reason

    def candidates(self, problem: Problem, adds_bias: bool = False) -> tuple[Candidate, ...]:
        # No algorithm needs a bias to be fast, so none is listed a second time with one.
        if adds_bias:
            return ()
        reasons = {name: self.refusal(problem, name) for name in ALGORITHMS}
        names = [name for name, reason in reasons.items() if reason is None]
        if not names:
            raise UnsupportedError(
                f"no algorithm of {self.name} computes {problem}: {reasons['torch_default']}"
            )
        # If torch picks oneDNN, the candidate `onednn` is left out: timing the same
        # implementation twice would only add noise to the choice.
        if "torch_default" in names and chosen_kernel(problem) == "onednn":
            names = [name for name in names if name != "onednn"]
        return tuple(
            Candidate(
                problem,
                name,
                # Every other algorithm has only one implementation, with the same name.
                implementation=chosen_kernel(problem) if name == "torch_default" else "",
                is_deterministic=ALGORITHMS[name].is_deterministic(problem),
            )
            for name in names
        )

    def cost(self, problem: Problem, algorithm: str) -> Cost | None:
        if self.refusal(problem, algorithm) is not None:
            return None
        return ALGORITHMS[algorithm].cost(problem)

    def roofline(self, dtype: str) -> Roofline:
        return roofline(dtype)

    def executable(self, problem: Problem, algorithm: str) -> Executable:
        reason = self.refusal(problem, algorithm)
        if reason is not None:
            raise UnsupportedError(f"{algorithm} does not compute {problem}: {reason}")
        return ALGORITHMS[algorithm].executable(problem)

    def operands(self, problem: Problem, samples: int) -> tuple[Tensor, Tensor]:
        """Standard normal operands, so that sums neither overflow nor vanish."""
        shapes = replace(problem, batch=samples).operand_shapes
        # The values come from a generator of their own, so that measuring does not change the
        # user's random state.
        generator = torch.Generator().manual_seed(0)
        a, b = (_normal(problem, shape, generator) for shape in shapes)
        return a, b

    def workspace_bytes(
        self, run: Callable[[], Tensor | None], parts: Iterable[tuple[Problem, str]]
    ) -> int:
        # Memory that torch's profiler does not see is added to the peak that it sees. Chunks run
        # one after another, so the largest amount of any chunk is added, and not the sum of all.
        unseen = (
            unseen_bytes(computed, kernel, torch.get_num_threads())
            for problem, algorithm in set(parts)
            for computed, kernel in ALGORITHMS[algorithm].kernels(problem)
        )
        return max(unseen, default=0) + allocated_peak_bytes(run)

    def span(self, run: Callable[[], object]) -> Span:
        return allocated(run)[1]

    def implementation_of(self, problem: Problem, algorithm: str) -> str:
        return chosen_kernel(problem) if algorithm == "torch_default" else algorithm

    def elapsed_ns(self, run: Callable[[], object]) -> int:
        # A call on a CPU returns when its result is complete, so the host's clock is enough.
        start = time.perf_counter_ns()
        run()
        return time.perf_counter_ns() - start

    def state(self) -> DeviceState:
        return DeviceState(_load.load())

    def activity(self) -> Activity:
        # Involuntary context switches are counted: those in which the scheduler takes the processor
        # away from a thread that still has work.
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        return Activity(time.perf_counter_ns(), time.process_time_ns(), switches)

    def cache_bytes(self) -> int:
        return processor.usable_cache_bytes()

    def available_bytes(self) -> int:
        return processor.available_memory_bytes()


def _normal(problem: Problem, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A tensor of random values that repeat, because drawing all would take longer than timing."""
    whole = empty(problem, shape)
    # Values are written in memory order, whatever the layout. They are drawn in float32 and then
    # converted, so that all dtypes get the same values up to rounding.
    memory = whole.as_strided((whole.numel(),), (1,))
    drawn = torch.empty(min(len(memory), _DRAWN), dtype=torch.float32, device="cpu")
    drawn.normal_(generator=generator)
    repeat_into(memory, drawn)
    return whole
