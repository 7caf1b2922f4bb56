"""The cuDNN backend on a GPU: list and build engines, and measure memory and time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ucudnn.backends._base import AbstractBackend, DeviceState, Executable, Span
from ucudnn.backends.cudnn import gpu
from ucudnn.backends.cudnn.api import Cudnn, find_library
from ucudnn.backends.cudnn.engine import parse_identity
from ucudnn.backends.cudnn.executable import DefaultExecutable, EngineExecutable
from ucudnn.backends.cudnn.gpu import empty_raw
from ucudnn.backends.cudnn.graph import views_of
from ucudnn.backends.cudnn.runtime import Runtime
from ucudnn.backends.tensors import padded, torch_dtype
from ucudnn.config import ranks_per_device
from ucudnn.errors import UnsupportedError
from ucudnn.measurement import Candidate, Conditions, Device, Software
from ucudnn.problem import Problem
from ucudnn.split import DEFAULT_ALGORITHM

_MOST_ELEMENTS = 2**31 - 1  # engines index with 32 bits
# Problems whose engines are remembered. Listing them takes milliseconds, and tuning asks for the
# same problem many times.
_MOST_PROBLEMS = 4096
_torch: Any = torch.backends.cudnn  # a module that is replaced by an object when it is imported


class _Settings(NamedTuple):
    """Settings that torch's own choice of a convolution depends on, in every process."""

    benchmark: bool
    deterministic: bool
    precision: str

    @classmethod
    def read(cls) -> _Settings:
        # The measuring worker is a process of its own, in which torch starts with its defaults.
        return cls(_torch.benchmark, _is_deterministic(), _torch.conv.fp32_precision)

    def apply(self) -> None:
        _torch.benchmark, _torch.deterministic, _torch.conv.fp32_precision = self


def _is_deterministic() -> bool:
    return bool(_torch.deterministic) or torch.are_deterministic_algorithms_enabled()


def _opened_elsewhere(index: int, settings: _Settings) -> CudnnBackend:
    torch.cuda.set_device(index)
    settings.apply()
    return CudnnBackend()


@lru_cache
def _runtime(library: Path) -> Runtime:
    """The runtime of a library, one for all backends of the process.

    Backends are opened again and again, also whenever a shape without a plan is tuned. A handle
    takes memory of the GPU, and is never closed.
    """
    return Runtime(Cudnn(library))


def _laid_out(problem: Problem, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if problem.layout == "nchw":
        return empty_raw(shape, torch_dtype(problem), device)
    batch, channels, *spatial = shape
    memory = empty_raw((batch, *spatial, channels), torch_dtype(problem), device)
    return memory.movedim(-1, 1)


class CudnnBackend(AbstractBackend):
    """cuDNN's precompiled engines, and torch's own convolution, on the GPU that is current.

    Engines that compile their kernel when they are built are left out, because each would take up
    to two seconds in every process.
    """

    name = "cudnn"
    in_worker = True  # a kernel that faults makes the GPU useless to its process
    candidate_timeout_s = 60.0

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "backend 'cudnn' runs on an NVIDIA GPU and torch sees none; plan for one that is "
                "elsewhere by its measurements, with backend='recorded'"
            )
        # Fixed here: a later `torch.cuda.set_device` must not mix two GPUs in one plan.
        self._index = torch.cuda.current_device()
        _torch.version()  # loads torch's cuDNN, which is then found
        self.runtime = _runtime(find_library())
        self._candidates = lru_cache(_MOST_PROBLEMS)(self._enumerate)

    # Handles and plans of cuDNN cannot be pickled; the worker opens the backend anew.
    def __reduce__(self) -> tuple[Callable[..., CudnnBackend], tuple[int, _Settings]]:
        return _opened_elsewhere, (self._index, _Settings.read())

    def device(self) -> Device:
        return gpu.cuda_device(self._index)

    def software(self) -> Software:
        return gpu.cuda_software(self.runtime.cudnn.version_text)

    def conditions(self) -> Conditions:
        ranks = ranks_per_device()
        percent = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        return Conditions(
            allocator=f"torch-{torch.cuda.get_allocator_backend()}",
            ranks_per_device=ranks,
            # Without MPS, which `ucudnn launch` always gives a percentage, ranks take turns.
            mps_percent=int(percent) if percent else 100 if ranks == 1 else 0,
        )

    def is_broken(self) -> bool:
        """True if a kernel has faulted: CUDA then refuses everything until the process ends."""
        try:
            torch.cuda.synchronize(self._index)
        except RuntimeError:
            return True
        return False

    def state(self) -> DeviceState:
        return DeviceState(notes=gpu.gpu_notes(self._index))

    def algorithms(self) -> tuple[str, ...]:
        """torch's own only: engines are enumerated for each problem."""
        return (DEFAULT_ALGORITHM,)

    def refusal(self, problem: Problem, algorithm: str) -> str | None:
        """Reason why an algorithm does not compute a problem; None if it does, or may.

        Whether an engine computes a batch that was never enumerated is only known after building
        it.
        """
        if problem.layout == "nhwc" and problem.rank == 1:
            return "torch has no channels-last layout for 1-D tensors; use layout='nchw'"
        if algorithm == DEFAULT_ALGORITHM:
            return None
        try:
            _, _, adds_bias = parse_identity(algorithm)
        except UnsupportedError as error:
            return str(error)
        if adds_bias and problem.op != "fprop":
            return "it adds a bias, which fprop alone has"
        largest = max(prod(shape) for shape in (*problem.operand_shapes, problem.result_shape))
        if largest > _MOST_ELEMENTS:
            return f"engines count elements with 32 bits and a tensor has {largest}; split further"
        return None

    def candidates(self, problem: Problem) -> tuple[Candidate, ...]:
        """torch's own, then what cuDNN proposes, best first, as PyTorch's settings allow."""
        engines = self._candidates(problem, _is_deterministic(), False)
        # torch picks among all of cuDNN's engines, unless it is told to be deterministic.
        default = Candidate(problem, DEFAULT_ALGORITHM, is_deterministic=_is_deterministic())
        return default, *engines

    def bias_candidates(self, problem: Problem) -> tuple[Candidate, ...]:
        """cuDNN's proposals for the fused pattern convolution + bias, which fprop alone has."""
        if problem.op != "fprop":
            return ()
        return self._candidates(problem, _is_deterministic(), True)

    def _enumerate(
        self, problem: Problem, deterministic: bool, bias: bool
    ) -> tuple[Candidate, ...]:
        reason = self.refusal(problem, DEFAULT_ALGORITHM)
        if reason is not None:
            raise UnsupportedError(f"no algorithm of {self.name} computes {problem}: {reason}")
        try:
            proposed = self.runtime.configurations(self._index, problem, bias=bias)
        except UnsupportedError:  # cuDNN has nothing; torch has kernels of its own
            proposed = []
        return tuple(
            Candidate(
                problem,
                one.identity,
                one.workspace_bytes,
                one.notes,
                is_deterministic=one.is_deterministic,
                adds_bias=bias,
            )
            for one in proposed
            if one.is_allowed(problem, deterministic)
            and not one.is_runtime_compiled
            and self.refusal(problem, one.identity) is None
        )

    def kernel(self, problem: Problem, algorithm: str) -> str:
        """The algorithm: an engine is one implementation, and torch does not show its choice."""
        del problem
        return algorithm

    def executable(self, problem: Problem, algorithm: str) -> Executable:
        """Build a candidate, for any number of samples.

        If cuDNN does not compute a problem by this engine, `build_refusal` or a run shows it.
        """
        # operands beyond 32 bits may be met in chunks that are not
        reason = self.refusal(problem.with_batch(1), algorithm)
        if reason is not None:
            raise UnsupportedError(f"{algorithm} does not compute {problem}: {reason}")
        if algorithm == DEFAULT_ALGORITHM:
            return padded(problem, DefaultExecutable)
        return EngineExecutable(self.runtime, problem, algorithm)

    def build_refusal(self, problem: Problem, algorithm: str) -> str | None:
        """Build an engine's plans for this batch, also the one that adds to a gradient."""
        if algorithm == DEFAULT_ALGORITHM:
            return None
        # beta=1 is a plan of its own, with more workspace. In half precision chunks are added in
        # float32 by torch instead, so that no such plan is needed.
        adds = problem.op == "wgrad" and problem.bytes_per_element >= 4
        try:
            for beta in (0.0, 1.0) if adds else (0.0,):
                views = views_of(problem)
                self.runtime.build(self._index, problem, algorithm, 1.0, beta, views)
        except (UnsupportedError, RuntimeError) as error:
            return str(error)
        return None

    def operands(self, problem: Problem, samples: int) -> tuple[Tensor, Tensor]:
        """Standard normal operands, so that sums neither overflow nor vanish."""
        device = torch.device("cuda", self._index)
        generator = torch.Generator(device).manual_seed(0)
        resized = problem.with_batch(samples)
        a, b = (
            _laid_out(resized, shape, device).normal_(generator=generator)
            for shape in resized.operand_shapes
        )
        return a, b

    def workspace_bytes(
        self, run: Callable[[], Tensor | None], parts: Iterable[tuple[Problem, str]]
    ) -> int:
        if _torch.benchmark and DEFAULT_ALGORITHM in {name for _, name in parts}:
            # cudnn.benchmark first tries all engines of a shape, however much memory they take.
            run()
        native = torch.cuda.get_allocator_backend() == "native"
        # what was asked for, where it is known: what is handed out is rounded up to 512 bytes
        count = "requested_bytes" if native else "allocated_bytes"
        torch.cuda.reset_peak_memory_stats(self._index)
        before = torch.cuda.memory_stats(self._index)[f"{count}.all.current"]
        result = run()
        peak = torch.cuda.memory_stats(self._index)[f"{count}.all.peak"]
        kept = 0 if result is None else result.untyped_storage().nbytes()
        return max(int(peak) - int(before) - kept, 0)

    def spans(self, run: Callable[[Callable[[], None]], object]) -> list[Span]:
        found, before = list[Span](), self.allocated_bytes()

        # The allocator counts when the host calls it, so that nothing need be waited for.
        def mark() -> None:
            peak = torch.cuda.max_memory_allocated(self._index)
            found.append(Span(peak - before, self.allocated_bytes() - before))
            torch.cuda.reset_peak_memory_stats(self._index)

        torch.cuda.reset_peak_memory_stats(self._index)
        run(mark)
        mark()
        return found

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self._index))

    def elapsed_ns(self, run: Callable[[], object]) -> int:
        # Events are recorded by the device; the host's clock would count the launch, too.
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        elapsed_ms: float = begin.elapsed_time(end)
        return round(elapsed_ms * 1e6)

    def cache_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self._index).L2_cache_size)

    def memory_bytes(self) -> int:
        """Half of the memory that is free or cached by torch's allocator."""
        free, _ = torch.cuda.mem_get_info(self._index)
        kept = torch.cuda.memory_reserved(self._index) - torch.cuda.memory_allocated(self._index)
        # torch's allocator keeps blocks that CUDA does not count as free, though they can be used.
        return int(free + kept) // 2
