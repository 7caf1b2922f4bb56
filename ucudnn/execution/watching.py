"""Watch the convolutions of a step: when each begins and ends, and what it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from ucudnn.backends import aten
from ucudnn.backends.tensors import memory_format, problem_of
from ucudnn.execution.autograd import Geometry
from ucudnn.execution.override import Convolution, Everything
from ucudnn.execution.runner import Runner
from ucudnn.problem import Problem
from ucudnn.system.processes import ForkSafeLock


class WatchedCall(NamedTuple):
    """One call of a convolution.

    Args:
        copied: for each kernel that it runs - one, or two gradients - the bytes of operands that
            must be copied first, because they do not lie in memory as the kernel reads them.
            Kernels that cannot be planned are left out.
        marks: numbers of the marks before it was looked up, before it ran, and after it had run.
    """

    copied: Mapping[Problem, int]
    marks: tuple[int, int, int]


class Watcher:
    """Computes all convolutions of this process, by torch or by a plan, and notes each call.

    It makes three marks for each: before it is looked up, before it runs, and after it has run.

    Attributes:
        calls: all calls, in the order in which they ended.

    Args:
        mark: makes a mark.
        runner: of the plan; None: torch's own convolutions.
    """

    def __init__(
        self,
        mark: Callable[[], None],
        runner: Runner | None = None,
    ) -> None:
        self.calls: list[WatchedCall] = []
        self.filter_shapes = Everything()
        self._mark = mark
        self._runner = runner
        # Threads that use streams of their own may call convolutions at the same time.
        self._lock = ForkSafeLock()
        self._marks = 0

    def mark(self) -> int:
        """Make a mark and return its number."""
        with self._lock:
            self._mark()
            self._marks += 1
            return self._marks - 1

    def note(self, copied: Mapping[Problem, int], looked_up: int, began: int) -> None:
        """Note a call that has just ended, with its last mark."""
        marks = looked_up, began, self.mark()
        self.calls.append(WatchedCall(copied, marks))

    def bound(self, x: Tensor, w: Tensor, geometry: Geometry) -> Convolution:
        """The convolution of operands of these shapes."""
        # Looking up a problem or a plan may allocate memory, which is no part of the step.
        number, runner = self.mark(), self._runner
        return _Marked(self, convolution_by(runner, x, w, geometry), geometry, number)


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


def convolution_by(runner: Runner | None, x: Tensor, w: Tensor, geometry: Geometry) -> Convolution:
    """The convolution of operands of these shapes by a plan; by torch where there is none."""
    if runner is None or w.shape not in runner.filter_shapes:
        return _Torchs(geometry)
    return runner.bound(x, w, geometry)


class _Marked(NamedTuple):
    """A convolution whose calls are noted."""

    watcher: Watcher
    convolution: Convolution
    geometry: Geometry
    looked_up: int

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        copied = self._copied(x, w, {"fprop": (x, w)})
        began = self.watcher.mark()
        result = self.convolution.forward(x, w, bias)
        self.watcher.note(copied, self.looked_up, began)
        return result

    def backward(
        self, dy: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        operands = {"dgrad": (dy, w), "wgrad": (x, dy)}
        asked = {op: operands[op] for op, wanted in zip(operands, mask, strict=False) if wanted}
        copied = self._copied(x, w, asked)
        began = self.watcher.mark()
        result = self.convolution.backward(dy, x, w, bias_sizes, mask)
        self.watcher.note(copied, self.looked_up, began)
        return result

    def _copied(
        self, x: Tensor, w: Tensor, operands: Mapping[str, tuple[Tensor, ...]]
    ) -> Mapping[Problem, int]:
        found = {op: problem_of(op, x, w, *self.geometry) for op in operands}
        return {
            problem: sum(map(_bytes, (one for one in operands[op] if not _lies_in(one, problem))))
            for op, problem in found.items()
            if problem is not None
        }


def _lies_in(tensor: Tensor, problem: Problem) -> bool:
    return tensor.is_contiguous(memory_format=memory_format(problem))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
