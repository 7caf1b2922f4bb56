"""The cuDNN backend on a GPU: list and build engines, and measure memory and time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ucudnn.backends._base import (
    AbstractBackend,
    BoundChunk,
    DeviceState,
    Elapsed,
    Executable,
    Launcher,
    Span,
)
from ucudnn.backends.cudnn import gpu
from ucudnn.backends.cudnn.api import Cudnn, find_library
from ucudnn.backends.cudnn.engine import parse_identity
from ucudnn.backends.cudnn.executable import DefaultExecutable, EngineCall, EngineExecutable, Part
from ucudnn.backends.cudnn.gpu import empty_raw
from ucudnn.backends.cudnn.graph import MOST_ELEMENTS, views_of
from ucudnn.backends.cudnn.runtime import Runtime
from ucudnn.backends.tensors import padded, torch_dtype
from ucudnn.config import ranks_per_device
from ucudnn.errors import UnsupportedError
from ucudnn.measurement import Candidate, Conditions, Device, Software
from ucudnn.problem import Problem, strides_of
from ucudnn.split import DEFAULT_ALGORITHM

# Engines that compute wrong results if the padding at both ends of an axis differs, without an
# error. Found with cuDNN 9.19 on an H100; PyTorch never asks cuDNN for such padding.
_WRONG_WITH_UNEQUAL_PADDING = {"fprop": (), "dgrad": (50,), "wgrad": (1, 18, 20)}
# Versions of cuDNN whose 3-D engines compute wrong results without an error. In half precision and
# channels-first layout torch does not use them, unless the filter has one element (Convolution.cpp
# since torch 2.9.1; pytorch#163539, PR#166480). For TF32 cuDNN's developers name no limits but the
# versions, 9.10.2 to 9.15 (PR#167024).
_WRONG_IN_HALF = range(90800, 91500)
_WRONG_IN_TF32 = range(91002, 91600)
# Number of problems whose engines are remembered. Listing the engines of a problem takes
# milliseconds, and tuning asks for the same problem many times.
_MOST_PROBLEMS = 4096
_torch: Any = torch.backends.cudnn  # `Any`, because torch replaces this module by an object


class _Settings(NamedTuple):
    """Settings of torch on which its own choice of a kernel depends, and its limit of memory."""

    enabled: bool
    benchmark: bool
    benchmark_limit: int
    deterministic: bool
    precision: str
    memory_fraction: float

    @classmethod
    def read(cls, index: int) -> _Settings:
        # The settings are passed on to the measuring worker, another process, where torch starts
        # with its default settings.
        fraction = torch.cuda.get_per_process_memory_fraction(index)
        if fraction < 1:
            # The user limits this process, so both processes together stay within the limit.
            whole = torch.cuda.get_device_properties(index).total_memory
            fraction = max(0.0, fraction - torch.cuda.memory_reserved(index) / whole)
        return cls(
            *(_torch.enabled, _torch.benchmark, _torch.benchmark_limit, _is_deterministic()),
            *(_torch.conv.fp32_precision, fraction),
        )

    def apply(self, index: int) -> None:
        _torch.enabled, _torch.benchmark, _torch.benchmark_limit, _torch.deterministic = self[:4]
        _torch.conv.fp32_precision = self.precision
        torch.cuda.set_per_process_memory_fraction(self.memory_fraction, index)


def _is_deterministic() -> bool:
    return bool(_torch.deterministic) or torch.are_deterministic_algorithms_enabled()


def _opened_elsewhere(index: int, settings: _Settings) -> CudnnBackend:
    torch.cuda.set_device(index)
    settings.apply(index)
    return CudnnBackend()


@lru_cache
def _runtime(library: Path) -> Runtime:
    """The runtime of a library, which all backends of the process share.

    Backends are opened often, for example whenever an unplanned shape is tuned. If each had a
    runtime of its own, it would open further handles, which take GPU memory and are never closed.
    """
    return Runtime(Cudnn(library))


def _laid_out(problem: Problem, shape: tuple[int, ...], device: torch.device) -> Tensor:
    memory = empty_raw(prod(shape), torch_dtype(problem), device)
    return memory.as_strided(shape, strides_of(shape, problem.layout == "nhwc"))


def _is_wrong_in_3d(problem: Problem, version: int) -> bool:
    """True if this version of cuDNN, a number such as 91002, may compute a 3-D problem wrongly."""
    if problem.rank < 3:
        return False
    if problem.dtype == "float32":
        return problem.math == "tf32" and version in _WRONG_IN_TF32
    is_half = problem.bytes_per_element == 2 and problem.layout == "nchw"
    return is_half and max(problem.kernel_size) > 1 and version in _WRONG_IN_HALF


def _engine_refusal(problem: Problem, algorithm: str, version: int) -> str | None:
    """Reason why an engine cannot compute a problem; None if it can, or may do so."""
    try:
        engine, _, adds_bias = parse_identity(algorithm)
    except UnsupportedError as error:
        return str(error)
    if adds_bias and problem.op != "fprop":
        return "it adds a bias, which fprop alone has"
    is_unequal = any(begin != end for begin, end in problem.padding)
    if is_unequal and engine in _WRONG_WITH_UNEQUAL_PADDING[problem.op]:
        return "its results are wrong if the padding at both ends of an axis differs"
    if _is_wrong_in_3d(problem, version):
        return (
            "3-D engines of this version of cuDNN may compute wrong results; install 9.16 or newer"
        )
    return None


class CudnnBackend(AbstractBackend):
    """cuDNN's precompiled engines, and torch's own convolution, on the current GPU of torch.

    Engines that compile a kernel when they are built are left out, because building one would take
    up to two seconds in every process.
    """

    name = "cudnn"
    in_worker = True  # after a fault in a CUDA kernel, its process can no longer use the GPU
    candidate_timeout_s = 60.0
    rounding_bytes = 512

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "backend 'cudnn' runs on an NVIDIA GPU and torch sees none; plan for one that is "
                "elsewhere by its measurements, with backend='recorded'"
            )
        # The GPU is chosen here once, so that a later `torch.cuda.set_device` cannot mix two GPUs
        # in one `Plan`.
        self._index = torch.cuda.current_device()
        _torch.version()  # loads torch's cuDNN, so that `find_library` finds it
        self.runtime = _runtime(find_library())
        self._candidates = lru_cache(_MOST_PROBLEMS)(self._enumerate)

    # Handles and plans of cuDNN cannot be pickled; the worker opens the backend anew.
    def __reduce__(self) -> tuple[Callable[..., CudnnBackend], tuple[int, _Settings]]:
        return _opened_elsewhere, (self._index, _Settings.read(self._index))

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
            # Ranks can use a GPU at the same time only with MPS, and `ucudnn launch` sets this
            # percentage whenever it uses MPS. 0 means that ranks take turns.
            mps_percent=int(percent) if percent else 100 if ranks == 1 else 0,
        )

    def is_broken(self) -> bool:
        """True if a CUDA kernel has faulted: CUDA refuses all later calls of this process."""
        try:
            torch.cuda.synchronize(self._index)
        except RuntimeError:
            return True
        return False

    def state(self) -> DeviceState:
        return DeviceState(notes=gpu.gpu_notes(self._index))

    def refusal(self, problem: Problem, algorithm: str) -> str | None:
        """Reason why an algorithm does not compute a problem; None if it does, or may do so.

        Whether an engine computes a batch for which no engines were listed is known only after
        building it.
        """
        if problem.layout == "nhwc" and problem.rank == 1:
            return "torch has no channels-last layout for 1-D tensors; use layout='nchw'"
        if algorithm == DEFAULT_ALGORITHM:
            return None
        if not torch._C._get_cudnn_enabled():
            return "torch.backends.cudnn.enabled is False"
        largest = max(prod(shape) for shape in (*problem.operand_shapes, problem.result_shape))
        if largest > MOST_ELEMENTS:
            return f"engines count elements with 32 bits and a tensor has {largest}; split further"
        return _engine_refusal(problem, algorithm, self.runtime.cudnn.version)

    def candidates(self, problem: Problem, adds_bias: bool = False) -> tuple[Candidate, ...]:
        """torch's own convolution, then the engines that PyTorch's settings allow, best first.

        With `adds_bias`, these are the engines for the fused pattern (convolution + bias), which
        only fprop has.
        """
        engines: tuple[Candidate, ...] = ()
        # What is remembered was listed while cuDNN was switched on.
        if torch._C._get_cudnn_enabled() and (problem.op == "fprop" or not adds_bias):
            engines = self._candidates(problem, _is_deterministic(), adds_bias)
        if adds_bias:
            return engines
        # torch may pick a nondeterministic engine, unless it is set to be deterministic.
        default = Candidate(problem, DEFAULT_ALGORITHM, is_deterministic=_is_deterministic())
        return default, *engines

    def _enumerate(
        self, problem: Problem, deterministic: bool, bias: bool
    ) -> tuple[Candidate, ...]:
        reason = self.refusal(problem, DEFAULT_ALGORITHM)
        if reason is not None:
            raise UnsupportedError(f"no algorithm of {self.name} computes {problem}: {reason}")
        try:
            proposed = self.runtime.configurations(self._index, problem, bias=bias)
        except UnsupportedError:  # cuDNN has no engine, but torch has kernels of its own
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

    def executable(self, problem: Problem, algorithm: str) -> Executable:
        """Build a candidate, for any number of samples.

        Only `build_refusal` or a run shows whether the engine computes the problem.
        """
        # The refusal is asked at batch 1, because a whole problem may be too large for 32-bit
        # indices while its chunks are not.
        reason = self.refusal(problem.with_batch(1), algorithm)
        if reason is not None:
            raise UnsupportedError(f"{algorithm} does not compute {problem}: {reason}")
        if algorithm == DEFAULT_ALGORITHM:
            return padded(problem, DefaultExecutable)
        return EngineExecutable(self.runtime, problem, algorithm)

    def launcher(self, problem: Problem, chunks: Sequence[BoundChunk]) -> Launcher | None:
        """A call that launches all engines in one loop; None unless engines compute all chunks."""
        is_sum = problem.op == "wgrad"
        # In half precision torch adds the chunks of a sum, in float32.
        is_torchs_sum = is_sum and len(chunks) > 1 and problem.bytes_per_element < 4
        parts = list[Part]()
        for chunk in chunks:
            is_engine = isinstance(chunk.executable, EngineExecutable)
            if chunk.problem is None or not is_engine or is_torchs_sum:
                return None
            places = (chunk.a, chunk.b, chunk.out)
            beta = 1.0 if is_sum and parts else 0.0
            parts.append(Part(chunk.problem, chunk.algorithm, places, beta=beta))
        return EngineCall(self.runtime, problem, parts)

    def build_refusal(self, problem: Problem, algorithm: str) -> str | None:
        """Build an engine's execution plans for this batch; return why one fails, or None."""
        if algorithm == DEFAULT_ALGORITHM:
            return None
        # Adding to a gradient (beta=1) needs another execution plan, with more workspace. In half
        # precision no such plan is needed, because torch adds the chunks in float32.
        adds = problem.op == "wgrad" and problem.bytes_per_element >= 4
        try:
            for beta in (0.0, 1.0) if adds else (0.0,):
                views = views_of(problem)
                self.runtime.build_plan(self._index, problem, algorithm, 1.0, beta, views)
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
            # At the first call with a shape, cudnn.benchmark tries all engines, whatever memory
            # they take. This run is not measured, so that their memory does not count as workspace.
            run()
        native = torch.cuda.get_allocator_backend() == "native"
        # Allocated sizes are rounded up to 512 bytes. Requested sizes are exact, but only the
        # native allocator counts them.
        count = "requested_bytes" if native else "allocated_bytes"
        torch.cuda.reset_peak_memory_stats(self._index)
        before = torch.cuda.memory_stats(self._index)[f"{count}.all.current"]
        result = run()
        peak = torch.cuda.memory_stats(self._index)[f"{count}.all.peak"]
        kept = 0 if result is None else result.untyped_storage().nbytes()
        return max(int(peak) - int(before) - kept, 0)

    def span(self, run: Callable[[], object]) -> Span:
        before = self.allocated_bytes()
        torch.cuda.reset_peak_memory_stats(self._index)
        run()
        # The allocator counts memory when the host calls it, so there is no need to wait.
        peak = torch.cuda.max_memory_allocated(self._index)
        return Span(peak - before, self.allocated_bytes() - before)

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

    def elapsed_apart(self, run: Callable[[], object], lead_ns: int) -> Elapsed:
        host_ns = 0

        def launch() -> None:
            nonlocal host_ns
            began = perf_counter_ns()
            run()
            host_ns = perf_counter_ns() - began

        gpu.keep_busy(lead_ns)
        device_ns = self.elapsed_ns(launch)
        return Elapsed(device_ns, host_ns)

    def cache_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self._index).L2_cache_size)

    def available_bytes(self) -> int:
        """Memory that is free or unused in torch's allocator, within the limit of the process."""
        free, whole = torch.cuda.mem_get_info(self._index)
        allocated = self.allocated_bytes()
        # Blocks that torch's allocator keeps unused are not free for CUDA, but torch can use them.
        kept = torch.cuda.memory_reserved(self._index) - allocated
        # The fraction of the memory that `torch.cuda.set_per_process_memory_fraction` has allowed.
        most = int(torch.cuda.get_per_process_memory_fraction(self._index) * whole)
        return max(0, min(int(free + kept), most - allocated))
