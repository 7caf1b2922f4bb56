"""The time that a planned call takes beyond its kernel and beyond torch's own call.

A planned call looks up its plan and goes through a Python autograd function. This time is measured
once per machine. A split replaces torch's own convolution only if it saves more time than this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from ucudnn.backends import AbstractBackend, aten, open_backend
from ucudnn.execution.autograd import AbstractRunner, Bound, Geometry, Pass, convolution
from ucudnn.execution.execute import Call, bind
from ucudnn.problem import OPS, Problem
from ucudnn.split import DEFAULT_ALGORITHM, Chunk, Split
from ucudnn.system.processes import ForkSafeLock

# Each round times several calls together, because one call is too short for the clock. Among this
# many rounds, a few are not interrupted.
_ROUNDS, _CALLS = 25, 5
# The largest overhead in ns that is believed: a larger value shows a busy machine.
_MOST_NS = 100_000
# A very small problem: its kernels, whose times vary, are a small part of what is timed.
_PROBLEM = Problem("fprop", 2, 4, 4, (6, 6), (3, 3))
_GEOMETRY = Geometry((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
_timing = ForkSafeLock()


def planned_call_ns(backend: AbstractBackend) -> int:
    """Time in ns that one pass of a planned layer takes on the host beyond what tuning times.

    It is 0 if the device computes asynchronously.
    """
    if not backend.blocks_host:
        return 0
    with _timing:
        return _measured(backend.name)


@lru_cache
def _measured(backend_name: str) -> int:
    """Time in ns per pass of a small layer by plan, minus that by torch, both without kernels."""
    threads = torch.get_num_threads()
    # A single thread never waits for other threads, so its processor time is that of the work.
    torch.set_num_threads(1)
    try:
        return _difference_ns(open_backend(backend_name))
    finally:
        torch.set_num_threads(threads)


def _difference_ns(backend: AbstractBackend) -> int:
    calls = {op: _undivided(backend, replace(_PROBLEM, op=op)) for op in OPS}
    # The caller may be in `no_grad`: there the autograd function, a part of the cost, does not run.
    with torch.inference_mode(False), torch.enable_grad():
        shapes = (_PROBLEM.x_shape, _PROBLEM.w_shape, _PROBLEM.y_shape)
        x, w, dy = (torch.ones(shape, device="cpu") for shape in shapes)
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        runner = _Runner(calls)
        runs: dict[str, Callable[[], object]] = {
            "planned": partial(_step, partial(convolution, runner), leaves, dy),
            "torch": partial(_step, _torchs, leaves, dy),
            "planned kernels": partial(_kernels, calls, x, w, dy),
            "torch kernels": partial(_torchs_kernels, x, w, dy),
        }
        times: dict[str, list[int]] = {name: [] for name in runs}
        for number in range(_ROUNDS + 1):
            for name, run in runs.items():
                start = time.thread_time_ns()  # processor time: without the host's waiting
                for _ in range(_CALLS):
                    run()
                if number:  # the first round, which looks plans up, does not count
                    times[name].append(time.thread_time_ns() - start)
    # Other work on the machine can only make times longer, so the shortest times are used.
    taken = {name: min(samples) / _CALLS for name, samples in times.items()}
    planned = taken["planned"] - taken["planned kernels"]
    own = taken["torch"] - taken["torch kernels"]
    return min(_MOST_NS, max(0, round((planned - own) / len(OPS))))


def _undivided(backend: AbstractBackend, problem: Problem) -> Call:
    """An undivided call by the first algorithm of the backend that is not torch's own."""
    names = (candidate.algorithm for candidate in backend.candidates(problem))
    algorithm = next(name for name in names if name != DEFAULT_ALGORITHM)
    return bind(backend, problem, Split("batch", (Chunk(problem.batch, algorithm),)))


class _Runner(AbstractRunner):
    """Runner for one known convolution."""

    def __init__(self, calls: dict[str, Call]) -> None:
        super().__init__()
        self._calls = calls

    def problems(self, x: Tensor, w: Tensor, geometry: Geometry) -> dict[str, Problem]:
        """All passes of the convolution."""
        del x, w, geometry
        return {op: call.problem for op, call in self._calls.items()}

    def bind(self, which: str, bound: Bound, has_bias: bool = False) -> Pass | None:
        """The planned call of a pass."""
        del has_bias
        bound.follow(which, self._calls[which])
        return bound.planned(which)


def _step(
    layer: Callable[..., Tensor], leaves: tuple[Tensor, Tensor], dy: Tensor
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(layer(*leaves, None, _GEOMETRY), leaves, dy)


def _torchs(x: Tensor, w: Tensor, bias: None, geometry: Geometry) -> Tensor:
    return torch.convolution(x, w, bias, *geometry)


def _kernels(calls: dict[str, Call], x: Tensor, w: Tensor, dy: Tensor) -> None:
    calls["fprop"](x, w)
    calls["dgrad"](dy, w)
    calls["wgrad"](x, dy)


def _torchs_kernels(x: Tensor, w: Tensor, dy: Tensor) -> None:
    aten.convolution(x, w, None, *_GEOMETRY)
    aten.convolution_backward(dy, x, w, None, *_GEOMETRY, [True, True, False])
