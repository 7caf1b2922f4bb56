"""Watch the convolutions of a step: when each begins and ends, and what it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from ucudnn.backends import aten
from ucudnn.backends.tensors import memory_format, problem_of
from ucudnn.execution.autograd import Geometry
from ucudnn.execution.override import Convolution
from ucudnn.execution.runner import Runner
from ucudnn.problem import Problem


class Watcher:
    """Computes all convolutions of this process, by torch or by a plan, and notes each call.

    It makes three marks for each: before it is looked up, before it runs, and after it has run.

    Attributes:
        calls: one per call, in order: for each kernel that it runs - one, or two gradients - the
            bytes of operands that must be copied first, because they do not lie in memory as the
            kernel reads them. Kernels that cannot be planned are left out.

    Args:
        mark: makes a mark.
        runner: of the plan; None: torch's own convolutions.
    """

    def __init__(self, mark: Callable[[], None], runner: Runner | None = None) -> None:
        self.mark = mark
        self.calls: list[Mapping[Problem, int]] = []
        self.filter_shapes = _Every()
        self._runner = runner

    def bound(self, x: Tensor, w: Tensor, geometry: Geometry) -> Convolution:
        """The convolution of operands of these shapes."""
        # Looking up a problem or a plan may allocate memory, which is no part of the step.
        self.mark()
        runner = self._runner
        if runner is None or w.shape not in runner.filter_shapes:
            return _Marked(self, _Torchs(geometry), geometry)
        return _Marked(self, runner.bound(x, w, geometry), geometry)


class _Every:
    """Contains everything."""

    def __contains__(self, value: object) -> bool:
        return True


class _Torchs(NamedTuple):
    """Torch's own convolution."""

    geometry: Geometry

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return aten.convolution(x, w, bias, *self.geometry)

    def backward(
        self, dy: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        found = aten.convolution_backward(dy, x, w, bias_sizes, *self.geometry, mask)
        return tuple(found)


class _Marked(NamedTuple):
    """A convolution whose calls are noted."""

    watcher: Watcher
    convolution: Convolution
    geometry: Geometry

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        self._begin(x, w, {"fprop": (x, w)})
        result = self.convolution.forward(x, w, bias)
        self.watcher.mark()
        return result

    def backward(
        self, dy: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        operands = {"dgrad": (dy, w), "wgrad": (x, dy)}
        asked = {op: operands[op] for op, wanted in zip(operands, mask, strict=False) if wanted}
        self._begin(x, w, asked)
        result = self.convolution.backward(dy, x, w, bias_sizes, mask)
        self.watcher.mark()
        return result

    def _begin(self, x: Tensor, w: Tensor, operands: Mapping[str, tuple[Tensor, ...]]) -> None:
        found = {op: problem_of(op, x, w, *self.geometry) for op in operands}
        copied = {
            problem: sum(map(_bytes, (one for one in operands[op] if not _lies_in(one, problem))))
            for op, problem in found.items()
            if problem is not None
        }
        self.watcher.calls.append(copied)
        self.watcher.mark()


def _lies_in(tensor: Tensor, problem: Problem) -> bool:
    return tensor.is_contiguous(memory_format=memory_format(problem))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
