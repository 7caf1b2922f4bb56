"""Executables of the cuDNN backend: engines, by their identities, and torch's own convolution.

No function here waits for the device. Results, workspace and temporary copies come from torch's
allocator on the current stream.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ucudnn.backends import aten
from ucudnn.backends._base import Executable, add_bias
from ucudnn.backends.cudnn.engine import parse_identity
from ucudnn.backends.cudnn.graph import ALIGNMENT_BYTES, View, Views
from ucudnn.backends.tensors import ComputedExecutable, Slices, memory_format, torch_dtype
from ucudnn.errors import RefusedError, UnsupportedError
from ucudnn.problem import Problem
from ucudnn.system.processes import ForkSafeLock

if TYPE_CHECKING:
    from ucudnn.backends.cudnn.api import Descriptor
    from ucudnn.backends.cudnn.engine import ExecutionPlan
    from ucudnn.backends.cudnn.runtime import Runtime

# The most variant packs (addresses of a chunk) that are kept for tensors of one layout; one takes 4
# KiB. Training steps repeat their addresses, but a program that never repeats any would otherwise
# keep all its packs.
_MOST_PACKS = 512
# The gradient of a chunk may exceed the largest float16 number, 65504, even if the sum of all
# chunks does not. So each chunk writes a sixteenth of its gradient, which overflows only from a
# million on. In exchange, float16 has its full precision from 2**-10 on instead of from 2**-14.
FLOAT16_HEADROOM = 16.0
_cudnn: Any = torch.backends.cudnn  # `Any`, because torch replaces this module by an object
# aten's output mask: gradients of x, w and bias
_DGRAD, _WGRAD = [True, False, False], [False, True, False]


class Part(NamedTuple):
    """What an engine computes in a call: alpha * convolution + beta * (old value of the result)."""

    problem: Problem
    identity: str
    places: tuple[Slices, Slices, Slices] = ((), (), ())  # of the operands and of the result
    alpha: float = 1.0
    beta: float = 0.0

    @property
    def adds_bias(self) -> bool:
        """True if the engine adds a bias, too."""
        return parse_identity(self.identity)[2]


class EngineCall:
    """A call whose parts are all computed by cuDNN's engines, launched one right after the other.

    An execution plan of cuDNN is for one number of samples, strides and alignments. So the plans
    are built when operands and result of these strides and alignments first occur.
    """

    def __init__(self, runtime: Runtime, problem: Problem, parts: Sequence[Part]) -> None:
        self._runtime = runtime
        self._problem = problem
        # Both are kept, because to derive them takes as long as to launch two chunks.
        self._shape, self._layout = problem.result_shape, memory_format(problem)
        self._parts = parts
        self._need_bias = any(part.adds_bias for part in parts)
        self._add_bias = all(part.adds_bias for part in parts)
        # A refusal is remembered, too, so that a refused layout is not tried again in every step.
        self._built: dict[Hashable, _Built | str] = {}

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor | None:
        """Compute a new result; None if an engine does not take the tensors as they lie."""
        out = self.new_result(a)
        return out if self.launch(a, b, out, bias) is None else None

    def new_result(self, like: Tensor) -> Tensor:
        """A tensor for the result, on the device and in the dtype of an operand."""
        form = self._layout
        return torch.empty(self._shape, dtype=like.dtype, device=like.device, memory_format=form)

    def launch(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> str | None:
        """Launch all parts; return None, or why an engine does not take the tensors as they lie.

        After a refusal, the memory of the result may have been written to.
        """
        first, second, result = pointers = a.data_ptr(), b.data_ptr(), out.data_ptr()
        # `place` is all that the plans depend on. Of an address only the remainder modulo 16 bytes
        # counts, because no engine asks for a larger alignment. So many addresses share a plan.
        place = (
            *(a.shape, a.stride(), a.dtype, first % ALIGNMENT_BYTES, a.get_device()),
            *(b.shape, b.stride(), b.dtype, second % ALIGNMENT_BYTES),
            *(out.stride(), result % ALIGNMENT_BYTES),
        )
        built = self._built.get(place)
        if built is None:
            built = self._built[place] = self._build(a, b, out)
        if isinstance(built, str):
            return built
        addresses: tuple[int, ...] = pointers
        if self._need_bias:
            usable = self._usable_bias(a, bias if self._add_bias else None)
            addresses = (*pointers, usable.data_ptr())
        try:
            built.launch(a, addresses)
        except UnsupportedError as error:
            # Some engines accept an alignment when a plan is built, and not at the launch.
            reason = self._built[place] = str(error)
            return reason
        if not self._add_bias:
            add_bias(out, bias)
        return None

    def _usable_bias(self, like: Tensor, bias: Tensor | None) -> Tensor:
        """A contiguous, aligned bias on the operands' device; zeros if there is none."""
        # Zeros are made anew for each call. Kept zeros could be read by a stream that does not wait
        # for the stream that wrote them. If made in a capture, they would belong to a CUDA graph.
        if bias is None:
            return like.new_zeros(self._problem.out_channels)
        if (bias.device, bias.dtype) != (like.device, like.dtype):
            raise ValueError(
                f"the bias must be {like.dtype} on {like.device} as the operands of "
                f"{self._problem}, got {bias.dtype} on {bias.device}"
            )
        is_usable = bias.is_contiguous() and bias.data_ptr() % ALIGNMENT_BYTES == 0
        return bias if is_usable else bias.clone(memory_format=torch.contiguous_format)

    def _build(self, a: Tensor, b: Tensor, out: Tensor) -> _Built | str:
        """Plans for tensors of these strides and alignments, or why an engine refuses them."""
        device, wholes = a.get_device(), (a, b, out)
        plans: dict[Hashable, ExecutionPlan] = {}
        placed = []
        for part in self._parts:
            problem = part.problem
            tensors = [whole[place] for whole, place in zip(wholes, part.places, strict=True)]
            _require_one_kind(problem, tensors)
            views = Views(*(_view(one, problem.layout) for one in _as_xwy(problem, *tensors)))
            key = (problem, part.identity, part.alpha, part.beta, views)
            # Equal chunks share a plan.
            if key not in plans:
                try:
                    plans[key] = self._runtime.build_plan(device, *key)
                except UnsupportedError as error:
                    return str(error)
            offsets = [
                one.data_ptr() - whole.data_ptr()
                for one, whole in zip(tensors, wholes, strict=True)
            ]
            # Every part adds the same bias.
            placed.append((plans[key], (*offsets, 0) if part.adds_bias else tuple(offsets)))
        return _Built(self._runtime, device, placed)


class EngineExecutable(Executable):
    """A cuDNN engine for operands with any number of samples, strides and alignment.

    If cuDNN does not support the strides or alignments, the engine runs on copies of the tensors.
    """

    def __init__(self, runtime: Runtime, problem: Problem, identity: str) -> None:
        self._runtime = runtime
        self._problem = problem
        self._identity = identity
        self._calls: dict[Hashable, EngineCall] = {}

    def alone(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._new(a, b, bias=bias)

    def write(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        self._run(a, b, out, bias=bias)

    def _new(self, a: Tensor, b: Tensor, alpha: float = 1.0, bias: Tensor | None = None) -> Tensor:
        out = self._call(a, alpha).new_result(a)
        self._run(a, b, out, alpha, bias=bias)
        return out

    def begin(self, a: Tensor, b: Tensor) -> Tensor:
        if a.dtype.itemsize >= 4:
            return self._new(a, b)
        scale = _headroom(a)
        first = self._new(a, b, alpha=1.0 / scale).float()
        return first if scale == 1.0 else first.mul_(scale)

    def add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if out.dtype == a.dtype:
            self._run(a, b, out, beta=1.0)
            return
        # torch adds the chunk, because no engine of cuDNN 9.19 writes a float32 gradient of half
        # operands. To add in half precision, by beta, would round the sum after every chunk: its
        # error would be 1.2 times that of one rounding with 2 chunks, 2.1 times with 8, and 5.7
        # times with 64. Here it is at most 1.5 times that of one rounding, with any number.
        scale = _headroom(a)
        out.add_(self._new(a, b, alpha=1.0 / scale), alpha=scale)

    def _run(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        alpha: float = 1.0,
        beta: float = 0.0,
        bias: Tensor | None = None,
    ) -> None:
        call = self._call(a, alpha, beta)
        if call.launch(a, b, out, bias) is None:
            return
        # Copies are contiguous and fully aligned: an engine that refuses them refuses any.
        layout = memory_format(self._problem)
        inner = torch.empty_like(out, memory_format=layout)
        # With beta = 0 cuDNN does not read the old result.
        if beta:
            inner.copy_(out)
        a, b = a.clone(memory_format=layout), b.clone(memory_format=layout)
        reason = call.launch(a, b, inner, bias)
        if reason is not None:
            raise RefusedError(reason)
        out.copy_(inner)

    def _call(self, a: Tensor, alpha: float, beta: float = 0.0) -> EngineCall:
        """The call for as many samples as the first operand has."""
        key = (a.shape[0], alpha, beta)
        call = self._calls.get(key)
        if call is None:
            problem = self._problem.with_batch(a.shape[0])
            part = Part(problem, self._identity, alpha=alpha, beta=beta)
            call = self._calls.setdefault(key, EngineCall(self._runtime, problem, (part,)))
        return call


def _headroom(like: Tensor) -> float:
    return FLOAT16_HEADROOM if like.dtype == torch.float16 else 1.0


class _Built:
    """The execution plans of a call and the variant packs of its launches, one thread at a time.

    cuDNN does not guarantee for all engines that two threads may execute one plan at once. So
    PyTorch keeps plans per thread. Here a lock is used instead, which costs a tenth of a
    microsecond: plans per thread would be built again in each thread, even during a graph capture.

    Args:
        runtime: what builds packs and launches plans.
        device: index of the GPU.
        placed: for each part its plan, and where its tensors begin, in bytes after those of the
            call.
    """

    def __init__(
        self, runtime: Runtime, device: int, placed: Sequence[tuple[ExecutionPlan, tuple[int, ...]]]
    ) -> None:
        self._runtime = runtime
        self._device = device
        self._placed = placed
        # The parts run one after the other, so they share the workspace of the largest.
        self._workspace_bytes = max(plan.workspace_bytes for plan, _ in placed)
        self._launches: dict[tuple[int, ...], list[tuple[ExecutionPlan, Descriptor]]] = {}
        self._launching = ForkSafeLock()

    def launch(self, like: Tensor, pointers: tuple[int, ...]) -> None:
        """Launch all parts for tensors at these addresses: operands, result, and bias if any."""
        workspace, address = None, 0
        if self._workspace_bytes:
            # The workspace is freed when the launches are enqueued, not when they have run. This is
            # safe: the memory is reused only by later launches on this stream.
            workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=like.device)
            address = workspace.data_ptr()
        key = (*pointers, address)
        with self._launching:
            launches = self._launches.get(key)
            if launches is None:
                launches = self._packed(pointers, address)
                # The oldest is dropped: to find the least recently used would slow every launch.
                if len(self._launches) * len(launches) >= _MOST_PACKS:
                    del self._launches[next(iter(self._launches))]
                self._launches[key] = launches
            self._runtime.launch(self._device, launches)
        del workspace

    def _packed(
        self, pointers: tuple[int, ...], address: int
    ) -> list[tuple[ExecutionPlan, Descriptor]]:
        launches = []
        for plan, offsets in self._placed:
            # A plan without a bias has no offset for the last of the addresses.
            begins = zip(pointers, offsets, strict=False)
            of_part = tuple(pointer + offset for pointer, offset in begins)
            workspace = address if plan.workspace_bytes else 0
            launches.append((plan, self._runtime.pack(plan, of_part, workspace)))
        return launches


def _require_one_kind(problem: Problem, tensors: Sequence[Tensor]) -> None:
    kinds = {(tensor.device, tensor.dtype) for tensor in tensors}
    if len(kinds) > 1 or torch_dtype(problem) not in {tensor.dtype for tensor in tensors}:
        there = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in tensors)
        raise ValueError(
            f"operands and result of {problem} must be {problem.dtype} on one device, got {there}"
        )
    shapes = (*problem.operand_shapes, problem.result_shape)
    found = tuple(tuple(tensor.shape) for tensor in tensors)
    if found != shapes:
        raise ValueError(
            f"operands and result of {problem} must have the shapes {shapes}, got {found}"
        )


def _as_xwy(problem: Problem, a: Tensor, b: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if problem.op == "fprop":
        return a, b, out
    return (out, b, a) if problem.op == "dgrad" else (a, out, b)


def _view(tensor: Tensor, layout: str) -> View:
    """Layout of a tensor in memory.

    torch does not define the stride of an axis of size 1, but cuDNN derives the layout from that
    stride. So this function sets it.
    """
    axes = range(tensor.dim())
    inward = [1, *reversed(axes[2:]), 0] if layout == "nhwc" else [*reversed(axes)]
    strides, packed = list(tensor.stride()), 1
    for axis in inward:
        if tensor.shape[axis] == 1:
            strides[axis] = packed
        packed = strides[axis] * tensor.shape[axis]
    return View(tuple(strides), gcd(ALIGNMENT_BYTES, tensor.data_ptr()))


class DefaultExecutable(ComputedExecutable):
    """torch's own convolution, by the engine that torch picks; TF32 only if `math` says so."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        # Only problems with equal padding at both ends get here: `padded` writes an excess at one
        # end out as zeros.
        self._geometry = aten.geometry_of(problem)

    def compute(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        problem, precision = self.problem, _cudnn.conv
        if problem.dtype != "float32" or aten.tf32_allowed() == (problem.math == "tf32"):
            return self._torchs(a, b, bias)
        # Only a measurement gets here: in training, a problem has the math that torch is set to.
        before = precision.fp32_precision
        precision.fp32_precision = "tf32" if problem.math == "tf32" else "ieee"
        try:
            return self._torchs(a, b, bias)
        finally:
            precision.fp32_precision = before

    def _torchs(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        problem = self.problem
        if problem.op == "fprop":
            return aten.convolution(a, b, bias, *self._geometry)
        # aten reads only the shape of the operand whose gradient is asked for
        if problem.op == "dgrad":
            x_like = a.new_empty(1).expand(a.shape[0], *problem.x_shape[1:])
            found = aten.convolution_backward(a, x_like, b, None, *self._geometry, _DGRAD)[0]
        else:
            w_like = torch.empty(
                problem.w_shape,
                dtype=a.dtype,
                device=a.device,
                memory_format=memory_format(problem),
            )
            found = aten.convolution_backward(b, a, w_like, None, *self._geometry, _WGRAD)[1]
        assert isinstance(found, Tensor)
        return add_bias(found, bias)
