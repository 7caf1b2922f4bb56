"""Stand-ins for the convolutions of a process, which record or time each of them.

They are installed like the runner of a plan, and called below autograd and autocast. They leave the
computation itself to torch or to a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from filelock import FileLock
from torch import Tensor

from ucudnn.backends import aten
from ucudnn.backends.tensors import problem_of
from ucudnn.execution.autograd import AbstractRunner, Bound, Geometry, Pass
from ucudnn.execution.override import Convolution, Everything
from ucudnn.execution.runner import Runner
from ucudnn.layer_table import Row, format_rows, lock_of, read_rows
from ucudnn.problem import OPS, Problem
from ucudnn.system.files import write

_Result = TypeVar("_Result")
_EVERYTHING = Everything()


class Recorder(AbstractRunner):
    """Counts the calls of each pass of each convolution; torch computes the convolutions.

    >>> import torch
    >>> recorder, geometry = Recorder(), Geometry((1,), (0,), (1,), False, (0,), 1)
    >>> x, w = torch.ones(2, 3, 9), torch.ones(4, 3, 3)
    >>> _ = [recorder.bound(x, w, geometry).forward(x, w, None) for _ in range(2)]
    >>> [(row.name, str(row.problem), row.calls) for row in recorder.rows()]
    [('conv1', 'fprop conv1d(3->4, k3, 9) at batch 2', 2)]
    """

    filter_shapes = Everything()

    def __init__(self) -> None:
        super().__init__()
        # The number of calls of each problem, counted separately with and without a bias.
        self._counts: Counter[tuple[Problem, bool]] = Counter()

    def problems(self, x: Tensor, w: Tensor, geometry: Geometry) -> dict[str, Problem]:
        """The problem of each pass that could be planned."""
        found = {which: problem_of(which, x, w, *geometry) for which in OPS}
        return {which: problem for which, problem in found.items() if problem is not None}

    def bind(self, which: str, bound: Bound, has_bias: bool = False) -> Pass | None:
        """Count a call; nothing is kept in `bound`, so that the next call also comes here."""
        with self._lock:
            self._counts[bound.problems[which], has_bias] += 1
        return None

    def decline(self, problem: Problem, sentence: str) -> None:
        """Say nothing: there is no plan."""

    def clear(self) -> None:
        """Set all counts to zero; a forked child does so, because its parent saves these counts."""
        self._counts.clear()

    def rows(self) -> list[Row]:
        """A row of the table for each problem so far, in the order of their first calls."""
        return _rows(self._counts)

    def save(self, path: str) -> None:
        """Add the counts to the table in a file, which is created if missing, and clear them."""
        # Some processes, such as workers of a DataLoader and launchers, compute no convolution.
        if not self._counts:
            return
        # The file is locked, because all ranks of a job save when the job ends.
        with FileLock(lock_of(path)):
            counts: Counter[tuple[Problem, bool]] = Counter()
            for row in read_rows(path) if Path(path).exists() else ():
                counts[row.problem, row.has_bias] += row.calls
            # Rows are named by their position. So that the rows of the file keep their names, its
            # counts come first.
            write(path, format_rows(_rows(counts + self._counts)).encode(), "the table of layers")
        self.clear()


def _rows(counts: Counter[tuple[Problem, bool]]) -> list[Row]:
    # The names of modules are not known here. Convolutions are numbered, and all passes of a
    # convolution have the same number.
    numbers: dict[Problem, int] = {}
    rows = []
    for (problem, has_bias), count in counts.items():
        number = numbers.setdefault(replace(problem, op="fprop"), len(numbers) + 1)
        rows.append(Row(f"conv{number}", problem, count, has_bias))
    return rows


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


class KernelTimer:
    """Computes convolutions of this process, by torch or by a plan, and times each kernel.

    `times_ns` has, for each kernel that can be planned, the total time of its calls. The two
    gradients of a layer are computed by separate calls, so that each is timed. For torch this takes
    as long as one call that computes both.
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
        # The look-up of the plan's call is timed together with the kernel, because it is part of
        # the cost of a plan.
        return _Timed(self, lambda: self._looked_up(x, w, geometry), geometry)

    def _looked_up(self, x: Tensor, w: Tensor, geometry: Geometry) -> Convolution:
        """The runner's convolution; torch's, if the runner lacks the filter's shape."""
        if self._runner is None or w.shape not in self._runner.filter_shapes:
            return _Torchs(geometry)
        return self._runner.bound(x, w, geometry)

    def timed(self, problem: Problem | None, compute: Callable[[], _Result]) -> _Result:
        """Call `compute`, and add its time to the problem's total; without a problem, only call."""
        if problem is None:
            return compute()
        results: list[_Result] = []
        time_ns = self._elapsed_ns(lambda: results.append(compute()))
        self.times_ns[problem] = self.times_ns.get(problem, 0) + time_ns
        return results[0]


class _Timed(NamedTuple):
    """A convolution whose kernels a `KernelTimer` times."""

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
        # The gradient of the bias is computed in the same call as that of the weights, as torch
        # does.
        of_weights = gradients("wgrad", [False, *mask[1:]])
        return of_input[0], *of_weights[1:]
