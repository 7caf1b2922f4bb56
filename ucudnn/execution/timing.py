"""Time the kernels of a step where they run, with memory and caches as the step leaves them."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ucudnn.backends.tensors import problem_of
from ucudnn.execution.autograd import Geometry
from ucudnn.execution.override import Convolution, Everything
from ucudnn.execution.runner import Runner
from ucudnn.execution.watching import convolution_by
from ucudnn.problem import Problem

_Result = TypeVar("_Result")
_EVERYTHING = Everything()


class KernelTimer:
    """Computes convolutions of this process, by torch or by a plan, and times each kernel.

    The two gradients of a layer are computed one after the other, which takes torch as long as both
    at once.

    Attributes:
        times_ns: of each kernel, all of its calls together. Kernels that no plan can be made for
            are left out.

    Args:
        elapsed_ns: runs a function and returns the time that it took on the device.
        runner: of the plan; None: torch's own convolutions.
        filter_shapes: of the convolutions to time; torch computes the others.
    """

    def __init__(
        self,
        elapsed_ns: Callable[[Callable[[], object]], int],
        runner: Runner | None = None,
        filter_shapes: Container[Any] = _EVERYTHING,
    ) -> None:
        self.filter_shapes = filter_shapes
        self.times_ns: dict[Problem, int] = {}
        self._elapsed_ns = elapsed_ns
        self._runner = runner

    def bound(self, x: Tensor, w: Tensor, geometry: Geometry) -> Convolution:
        """The convolution of operands of these shapes."""
        # Looking a plan up is part of what it costs, and is timed with each kernel.
        return _Timed(self, lambda: convolution_by(self._runner, x, w, geometry), geometry)

    def timed(self, problem: Problem | None, compute: Callable[[], _Result]) -> _Result:
        """Compute a kernel and add its time."""
        if problem is None:
            return compute()
        results: list[_Result] = []
        time_ns = self._elapsed_ns(lambda: results.append(compute()))
        self.times_ns[problem] = self.times_ns.get(problem, 0) + time_ns
        return results[0]


class _Timed(NamedTuple):
    """A convolution whose kernels are timed."""

    timer: KernelTimer
    look_up: Callable[[], Convolution]
    geometry: Geometry

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        problem = problem_of("fprop", x, w, *self.geometry)
        return self.timer.timed(problem, lambda: self.look_up().forward(x, w, bias))

    def backward(
        self, dy: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        def gradients(op: str, only: list[bool]) -> tuple[Tensor | None, ...]:
            if not any(only):
                return None, None, None
            # The gradient of the bias alone is no kernel of a plan.
            is_kernel = only != [False, False, True]
            problem = problem_of(op, x, w, *self.geometry) if is_kernel else None
            return self.timer.timed(
                problem, lambda: self.look_up().backward(dy, x, w, bias_sizes, only)
            )

        of_input = gradients("dgrad", [mask[0], False, False])
        # torch sums the bias along with the gradient of the weights.
        of_weights = gradients("wgrad", [False, *mask[1:]])
        return of_input[0], *of_weights[1:]
