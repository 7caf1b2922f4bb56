"""Ways to run a step that torch.compile compiles: each is compiled, compared, and measured.

What compiled code takes is not foreseen. torch's `activation_memory_budget` is a share of what is
kept for backward, not a limit of the peak, and a smaller share may have a larger peak. So ways are
tried: few shares, and modules that are recomputed inside the graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import ceil, inf
from time import monotonic
from typing import Any

from torch import nn
from torch.autograd.profiler import profile

from ucudnn.backends import AbstractBackend
from ucudnn.benchmark.failures import free_after
from ucudnn.benchmark.statistics import ratio_interval
from ucudnn.config import Config
from ucudnn.errors import first_line
from ucudnn.execution.channels_last import axes_of, why_not_channels_last
from ucudnn.execution.compiling import CompiledCall, is_compiled, original_of, replays_graphs
from ucudnn.execution.remembering import Remembered
from ucudnn.kernels.deadline import Deadline
from ucudnn.outcomes import Comparison, Compilation, Way
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.segment import WHOLE, StepDivision, compiled_as_told
from ucudnn.steps.comparing import CompiledComparer
from ucudnn.steps.race import StepMeter, steps_ns, tells
from ucudnn.steps.run import STEP_ERRORS, Steps
from ucudnn.verdict import CLEARLY, CONFIDENCE, TOLERATED, is_faster

# The default time for compiling, as a multiple of what the first way took.
_TIMES = 3
# A step without a share may keep a limit that is at least this part of the peak by torch.
_NEARLY = 0.85
# The most shares that are tried beside the first ones.
_MOST_SHARES = 3
# The most divisions that are tried for one limit; and the first foreseen peak that is aimed at, as
# a part of the limit, because compiled code also recomputes by itself what takes little time. Later
# ones follow from what was measured, with a margin.
_MOST_DIVISIONS, _FIRST_AIM, _AIMED = 4, 1.2, 0.99
# A division whose peak is below this part of the limit leaves room for a faster one.
_ROOMY = 0.93
_REPLAYS = "its compiled code replays CUDA graphs, which keep the kernels that they captured"


def reason_against_compiling(config: Config) -> str:
    """Why settings rule compiled ways out; "" if they do not."""
    if config.limit_bytes is None and config.total_bytes is None:
        return ""
    return "a limit of workspace is kept by planned convolutions, and compiled code has its own"


def compile_steps(model: nn.Module, steps: Steps, device_type: str) -> Compilation | None:
    """Let steps run compiled, as their division or the model's user says; None if neither does.

    The first compiled steps are run here. If they fail, the steps stay uncompiled, and the reason
    is returned. Steps are compiled once.
    """
    if steps.compilation is not None:
        return steps.compilation
    if steps.division.compiled is None and not is_compiled(model):
        return None
    # Compiled code that replays CUDA graphs is not raced: all ways would replay the kernels of the
    # way that was captured first.
    if device_type == "cuda" and replays_graphs(model):
        steps.compilation = Compilation(reason=_REPLAYS)
        return steps.compilation
    began, reason, graphs, breaks = monotonic(), "", 0, 0
    try:
        with _counted() as counts:
            steps.compile()
        graphs, breaks = counts
    # torch.compile raises errors of its own, whatever its backend raised.
    except _errors() as error:
        reason = f"torch.compile failed ({_said(error)})"
        free_after(error)
    found = Compilation(ceil(monotonic() - began), reason, graphs=graphs, breaks=breaks)
    if isinstance(steps.run, CompiledCall) and steps.run.backend is not None:
        nodes = sum(steps.run.backend.nodes)
        found = replace(found, nodes=nodes, uncompiled=_uncompiled(steps) if breaks else 0)
        if not nodes:
            found = replace(found, reason="torch.compile found no graph in it")
    steps.compilation = found
    return found


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Context whose result, in the end, is how many graphs Dynamo compiled, and its graph breaks.

    Inside it, Dynamo raises an error where it would give up and go on uncompiled.
    """
    from torch._dynamo import config
    from torch._dynamo.utils import counters

    def now() -> tuple[int, int]:
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    before, found = now(), list[int]()
    with config.patch(fail_on_recompile_limit_hit=True, suppress_errors=False):
        yield found
    found += [after - one for one, after in zip(before, now(), strict=True)]


def _errors() -> tuple[type[BaseException], ...]:
    """Errors that a compiled step may raise."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return (*STEP_ERRORS, FailOnRecompileLimitHit)


def _uncompiled(steps: Steps) -> int:
    """Operators of a forward that compiled code does not run."""
    before = Remembered(steps.model, "the model", updates=False)
    with before, profile(use_kineto=True, use_cpu=True) as profiler:
        steps.forward(steps.batch)
    found = 0
    for one in profiler.function_events:
        above, parent = list[str](), one.cpu_parent
        while parent is not None:
            above.append(parent.name)
            parent = parent.cpu_parent
        is_inside = any(
            name.startswith(("aten::", "CompiledFunction", "## Call")) for name in above
        )
        found += one.name.startswith("aten::") and not is_inside
    return found


def _said(error: BaseException) -> str:
    """The first informative line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A first line such as "backend='inductor' raised:" says less than the second one.
    said = lines[1] if len(lines) > 1 and lines[0].endswith(":") else " ".join(lines[:1])
    return said or type(error).__name__


# By how the step is divided and compiled, and by the layout: the way that was measured, or the
# reason why it is none.
KnownCompiled = dict[tuple[StepDivision, str], Way | str]


class CompiledWays:
    """Tries compiled ways to run a step of one model, each once, until its time is over.

    Args:
        model: any module.
        inputs: an example input, or a list of these.
        config: the settings.
        backend: backend of the model's device.
        held_bytes: what is allocated all through a step.
        problems: the convolutions of the model.
        known: what is known from before; it gets what is found now.
        share: at most so much of the batch is compared with torch.
        say: is told which way is compiled now.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        config: Config,
        backend: AbstractBackend,
        held_bytes: int,
        problems: Iterable[Problem],
        known: KnownCompiled | None = None,
        share: float = 1.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._say = say
        self._is_training = config.ops != ("fprop",)
        self._model, self._inputs, self._backend = model, inputs, backend
        self._layouts = _layouts_of(original_of(model)) if config.layout == "auto" else ("keep",)
        self._held_bytes = held_bytes
        self._comparer = CompiledComparer(
            model, inputs, is_training=self._is_training, problems=problems, share=share
        )
        self._budget_s = config.compile_budget_s
        self._longest_s = 0.0
        self._tried = {} if known is None else known
        # The copy on which the best way runs, and how it was compared.
        self._best: tuple[Way, Steps, Comparison] | None = None
        self._limit: float = inf
        self._seconds = 0.0
        self._not_tried = dict[str, None]()  # in order, each once

    @property
    def ways(self) -> list[Way]:
        """Those that were tried and compute what torch does."""
        return [one for one in self._tried.values() if isinstance(one, Way)]

    @property
    def best(self) -> Way:
        """The best way; there must be one."""
        assert self._best is not None
        return self._best[0]

    @property
    def steps(self) -> Steps:
        """Steps by the best way."""
        assert self._best is not None
        return self._best[1]

    @property
    def step_s(self) -> float:
        """Seconds of the slowest step that was measured."""
        return max((one.time_ns for one in self.ways), default=0) / 1e9

    @property
    def has_fitting(self) -> bool:
        """True if a way keeps the limit."""
        return self._best is not None and self.fits(self.best)

    def fits(self, way: Way) -> bool:
        """True if a way keeps the limit."""
        return way.peak_bytes <= self._limit

    def _cost(self, way: Way) -> tuple[float, int]:
        return max(0, way.peak_bytes - self._limit), way.time_ns

    def within(
        self,
        limit: float,
        torchs_bytes: int,
        first_layout: str = "keep",
        recomputed: Callable[[int], StepDivision] | None = None,
        divisions: Iterable[StepDivision] = (),
    ) -> Way | None:
        """The fastest way that keeps a limit, or the one with the smallest peak; None if none is.

        Args:
            limit: largest peak in bytes, all that is held included; infinity: none.
            torchs_bytes: the peak by torch.
            first_layout: the layout that is tried first.
            recomputed: modules that are recomputed as a whole, so that an uncompiled step is
                foreseen to keep a limit.
            divisions: further divisions to try.
        """
        self._limit = limit
        # So that more memory never costs more time, what is known comes first.
        for one in sorted(filter(self.fits, self.ways), key=lambda way: way.time_ns)[:1]:
            self.attempt(one.division, one.memory_format)
        share = 1.0 if limit >= _NEARLY * torchs_bytes else 0.5
        layout = self._layout_of(share, first_layout)
        divided = [one._replace(compiled=1.0) for one in divisions]
        for division in divided:
            if division.micro_batch is not None:
                self.attempt(division, layout)
        is_limited = bool(self._of_shares()) and limit < inf
        if is_limited:
            self._bisect(layout, 1)
        if recomputed is not None and limit < torchs_bytes:
            self._recomputing(recomputed, layout)
        if is_limited:
            self._bisect(layout, _MOST_SHARES - 1)
            for other in {one.memory_format for one in self._of_shares()} - {layout}:
                if not self.has_fitting:
                    self._bisect(other, _MOST_SHARES)
        for division in divided:  # with graph breaks around segments, seldom the best
            self.attempt(division, layout)
        return None if self._best is None else self._best[0]

    def _layout_of(self, share: float, first_layout: str) -> str:
        """Try a share in each layout; the layout of the best way, or else the first one."""
        for layout in dict.fromkeys((first_layout, *self._layouts)):
            self.attempt(StepDivision(compiled=share), layout)
        if not self._of_shares():  # by another share, steps may compute what torch does
            self.attempt(StepDivision(compiled=0.75), first_layout)
        # In a clearly faster layout that does not keep the limit yet, smaller shares may.
        clearly = CLEARLY[self._backend.device().type]
        best = min(
            self._of_shares(),
            key=lambda one: one.time_ns / (1 if self.fits(one) else clearly),
            default=None,
        )
        if best is None:
            return first_layout
        if share == 1.0:
            self.attempt(StepDivision(compiled=0.5), best.memory_format)
        return best.memory_format

    def _of_shares(self) -> list[Way]:
        return [one for one in self.ways if one.division.is_whole]

    def _bisect(self, layout: str, most: int) -> None:
        """Try more shares in a layout, at most so many."""
        for _ in range(most):
            found = [one for one in self._of_shares() if one.memory_format == layout]
            peaks = {float(one.division.compiled or 0): one.peak_bytes for one in found}
            share = next_share(peaks, self._limit)
            if share in peaks or self.attempt(StepDivision(compiled=share), layout) is None:
                break

    def _recomputing(self, recomputed: Callable[[int], StepDivision], layout: str) -> None:
        """Try modules that are recomputed, and adapt what an uncompiled step should take."""
        aim = int(_FIRST_AIM * self._limit)
        for _ in range(_MOST_DIVISIONS):
            began = monotonic()
            division = recomputed(aim)._replace(compiled=1.0)
            self._seconds += monotonic() - began
            if division.is_whole and aim > self._limit:
                aim = int(self._limit)
                continue
            if division.is_whole:
                break
            way = self.attempt(division, layout)
            if way is None or _ROOMY * self._limit <= way.peak_bytes <= self._limit:
                break
            aim = int(_AIMED * aim * self._limit / way.peak_bytes)

    def attempt(self, division: StepDivision, memory_format: str) -> Way | None:
        """Compile, compare and measure a way, unless it is known to be no better than the best.

        None if it fails, or computes something else, or for lack of time.
        """
        key, name = (division, memory_format), _named(division, memory_format)
        known = self._tried.get(key)
        if isinstance(known, str):
            return None
        if known is not None and not (self.fits(known) and self._is_best(known)):
            return known
        # What is known is compiled anew in seconds.
        if known is None and self._is_over:
            self._not_tried[name] = None
            return None
        began = monotonic()
        self._say(f"a step is compiled: {name}")
        how, way = (self._is_training, memory_format, division), None
        try:
            steps = Steps(self._model, self._inputs, *how)
            compilation = compile_steps(self._model, steps, self._backend.device().type)
            assert compilation is not None
            reason = compilation.reason
            with _counted():
                if not reason:
                    comparison, reason = self._comparer.compare(steps)
                if not reason:
                    way = self._measured(steps, name)
        except _errors() as error:
            reason = f"a step with it fails ({first_line(error)})"
            free_after(error)
        self._tried[key] = reason if way is None else way
        if way is not None and self._is_best(way):
            self._best = way, steps, comparison
        took_s = monotonic() - began
        self._seconds += took_s
        self._longest_s = max(self._longest_s, took_s)
        if self._budget_s is None:
            self._budget_s = _TIMES * took_s
        return way

    @property
    def _is_over(self) -> bool:
        # The first way is always compiled.
        left_s = inf if self._budget_s is None else self._budget_s - self._seconds
        return self._longest_s > 0 and left_s < self._longest_s / 2

    def _is_best(self, way: Way) -> bool:
        return self._best is None or self._cost(way) < self._cost(self._best[0])

    def is_faster(self, plan: Plan) -> bool:
        """True if steps by the best way are faster than those by a plan that is not compiled."""
        assert self._best is not None
        how = self._is_training, plan.memory_format, plan.division
        other = Steps(self._model, self._inputs, *how)
        meter = StepMeter(self._backend, [plan], Deadline.never())
        runs = [(other, plan), (self._best[1], None)]
        samples = meter.race(runs, lambda times: tells(*steps_ns(times)))
        planned, compiled = steps_ns(samples)
        ratios = ratio_interval(compiled, planned, CONFIDENCE)
        # In doubt, torch's own step stays. Of two other ways, it is the one that was faster.
        is_shorter = not plan.division.is_whole and ratios[0] < 1 - TOLERATED
        return is_shorter or is_faster(ratios, TOLERATED)

    def _measured(self, steps: Steps, name: str) -> Way:
        steps()  # gradients are None from now on
        times = [self._backend.elapsed_ns(steps) for _ in range(2)]
        gc.collect()  # what earlier steps left in cycles must not be freed in this one
        span = self._backend.span(steps)
        return Way(
            "compiled",
            name,
            peak_bytes=self._held_bytes + span.peak_bytes,
            time_ns=min(times),
            memory_format=steps.memory_format,
            division=steps.division,
        )

    def compilation(self, *, is_chosen: bool) -> Compilation:
        """What is told of the ways, and of the code of the chosen one."""
        told = tuple(replace(one, division=WHOLE) for one in self.ways)
        found = Compilation(reason="no compiled way is faster within the same memory")
        if is_chosen and self._best is not None:
            found = self._best[1].compilation or found
        return replace(
            found,
            seconds=ceil(self._seconds),
            ways=told,
            left_out=tuple(
                (_named(*key), why) for key, why in self._tried.items() if isinstance(why, str)
            ),
            not_tried=tuple(self._not_tried),
        )

    def plan(self, plan: Plan) -> Plan:
        """A plan by the best way, whose convolutions stay those of the compiler."""
        assert self._best is not None
        way, _, comparison = self._best
        return replace(
            plan,
            **way.division._asdict(),
            kernels=(),
            memory_format=way.memory_format,
            comparison=comparison,
            compilation=self.compilation(is_chosen=True),
        )


def _layouts_of(model: nn.Module) -> tuple[str, ...]:
    """The layouts that steps of a model may be in."""
    can_change = axes_of(model) and why_not_channels_last(model) is None
    return ("keep", "channels_last") if can_change else ("keep",)


def next_share(peaks: Mapping[float, int], limit: float) -> float:
    """The share of the activations to try next, given the peaks of some shares.

    A larger share is faster, so it is the one between the largest that keeps the limit and the next
    known one. If none does, it is one beside that with the smallest peak, in the larger gap,
    because a smaller share may have a larger peak.

    >>> next_share({0.5: 7, 1.0: 9}, limit=8)
    0.75
    >>> next_share({0.5: 7, 1.0: 9}, limit=6), next_share({0.25: 8, 0.5: 7, 1.0: 9}, limit=6)
    (0.25, 0.75)
    """
    fitting = [share for share, peak in peaks.items() if peak <= limit]
    best = max(fitting) if fitting else min(peaks, key=peaks.__getitem__)
    below = max((share for share in peaks if share < best), default=0.0)
    above = min((share for share in peaks if share > best), default=1.0)
    is_above = bool(fitting) or above - best > best - below
    return (best + (above if is_above else below)) / 2


def _named(division: StepDivision, memory_format: str) -> str:
    assert division.compiled is not None
    parts = [compiled_as_told(division.compiled)]
    if division.micro_batch is not None:
        parts.append(f"loop, micro-batches of {division.micro_batch}")
    if len(division.segments) > 1:
        parts.append(f"{len(division.segments)} segments")
    else:
        parts += map(str, division.segments)
    return ", ".join(parts + [memory_format] * (memory_format != "keep"))
