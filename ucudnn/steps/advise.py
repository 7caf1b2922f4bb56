"""`ucudnn.advise`: run a step in several ways, and time its convolutions."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod
from statistics import mean
from time import monotonic
from typing import Any

import torch
from torch import nn

from ucudnn.advice import (
    AS_IT_IS,
    BLOCKS,
    CHANNELS_LAST,
    COMPILED,
    FLOAT32,
    MALLOC,
    Advice,
    KernelAdvice,
    Largest,
)
from ucudnn.backends import AbstractBackend, Cost, open_backend
from ucudnn.backends.torch_cpu.processor import filling
from ucudnn.benchmark.statistics import median_ns, spread_ns
from ucudnn.config import Config, require_config
from ucudnn.errors import ConfigError, UnsupportedError, first_line, warn
from ucudnn.execution.compiling import is_compiled
from ucudnn.execution.micro_batching import batch_of
from ucudnn.kernels.deadline import Deadline
from ucudnn.kernels.shares import least_ns
from ucudnn.kernels.tune import device_type, layers_by_problem
from ucudnn.outcomes import Way
from ucudnn.plan import Plan, Timing
from ucudnn.problem import Problem
from ucudnn.segment import WHOLE, StepDivision
from ucudnn.split import DEFAULT_ALGORITHM
from ucudnn.steps.compiled import CompiledWays
from ucudnn.steps.foresee import Foreseer, foreseer_of, largest_batch
from ucudnn.steps.profile import StepProfile
from ucudnn.steps.race import race, tells, timed
from ucudnn.steps.run import STEP_ERRORS, Steps, reason_against_steps, undisturbed
from ucudnn.steps.search import SegmentSearch
from ucudnn.steps.tracing import trace_layers
from ucudnn.units import format_bytes
from ucudnn.verdict import EMULATED

# Seconds for the whole advice, which is for users who do not want to wait for tuning.
_MOST_S = 60.0
# The least number of seconds for timing kernels, however long the steps before it took.
_LEAST_S = 5.0
# Seconds for the search for segments of which the largest batch is told.
_FITS_S = 10.0
# Ways are tried until the first of these fractions of `_MOST_S` is over, then timed in turn until
# the second is over. The rest of the time is for timing kernels.
_TRIALS_PART, _STEPS_PART = 0.5, 0.8
# The number of rounds that a race must have time for, and the largest number of ways that race
# against the step as it is.
_ROUNDS, _MOST_RIVALS = 3, 4
# The search is for segments with a peak of at most these fractions of the peak of the step as it
# is. The most useful fraction comes first.
_SHARES = (0.5, 0.25, 0.75)
# Number of steps for a search for segments within one limit, and for the trial of another way.
_SEARCH_STEPS, _TRIAL_STEPS = 6, 4
# Number of steps for the first trial, that of micro-batches of at least two sizes.
_FIRST_STEPS = 9
# Steps that take less are not compiled: compiling takes seconds, and its gain would be small.
_LEAST_COMPILED_NS = 50_000_000
# A way is too slow to be of use for its time if a step takes more than this many times as long as
# by its rival: the step as it is, or the fastest micro-batches.
_SLOWER = 1.1
# A kernel is timed until its samples add up to `_ENOUGH_NS` or there are `_MOST_SAMPLES`. A slow
# kernel is timed only once, because it must not use up the time of all others.
_MOST_SAMPLES, _ENOUGH_NS = 7, 150_000_000


def advise(
    model: nn.Module,
    example_inputs: Any,
    config: Config | None = None,
    *,
    real: bool = False,
    dry: bool = False,
    on_kernel: Callable[[int, int], None] | None = None,
) -> Advice:
    """Foresee and run a step in several ways, report what fills its memory, and give a verdict.

    The ways are the step as it is, channels_last, segments, micro-batches, checkpoints, compiled
    steps and, by estimate, a plan for the convolutions; under autocast also the step in float32,
    which comes first: if it takes at most a tenth of the time, nothing else is tried. With a memory
    budget, the verdict is the largest batch that fits it. A step that does not fit the memory is
    foreseen and not run. There is no search for plans, and nothing is cached. Advice takes about a
    minute for steps of up to a second, and as long as compiling takes. Steps are run on deep copies
    of the model; the model and the states of random generators do not change. A compiled model is
    run uncompiled, with a warning.

    >>> import torch
    >>> advice = advise(torch.nn.Conv2d(3, 8, 3), torch.ones(2, 3, 9, 9))
    >>> [kernel.problem.op for kernel in advice.kernels], advice.verdict.endswith(".")
    (['fprop', 'wgrad'], True)

    Args:
        model: any module.
        example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs; or a
            list of these for several input sizes.
        config: the settings; only `ops`, `backend` and `memory_budget` matter; default: `Config()`.
        real: compute one step to find the convolutions, for a model whose control flow depends on
            values.
        dry: run no step: everything is foreseen, which takes seconds.
        on_kernel: called after every kernel, with the numbers of kernels done and of all kernels.

    Raises:
        ConfigError: the model does not accept the inputs or computes no convolution, or the
            backend is a recording, which cannot run steps.
    """
    config = require_config(config)
    require_live(config)
    where = device_type(config)
    traced = trace_layers(model, example_inputs, config.ops, real=real, device_type=where)
    if is_compiled(model):
        warn(
            "advice is by steps that are not compiled, and another layout may be faster where "
            "torch.compile fuses what stands between convolutions; tune with layout='auto', which "
            "judges a compiled model by compiled steps"
        )
    names = layers_by_problem(traced.layers, config)
    began, backend = monotonic(), open_backend(config.backend)
    # torch has no channels_last layout in 1-D, and "nhwc" problems are in channels_last already.
    has_other = any(problem.rank > 1 and problem.layout == "nchw" for problem in names)
    advice = _Trials(model, example_inputs, backend, config, began, dry).advice(has_other)
    if dry or advice.faster_float32 is not None:
        return advice
    until = max(began + _MOST_S, monotonic() + _LEAST_S)
    found: dict[Problem, KernelAdvice] = {}
    # Function modes of the caller, such as `with torch.device(...)`, would change where operands
    # are allocated.
    with torch.no_grad(), torch._C.DisableTorchFunction():
        # The kernels that probably take longest come first, because the time may run out.
        for problem in sorted(names, key=lambda p: -p.flops * len(names[p])):
            found[problem] = _timed_kernel(backend, problem, names[problem], until)
            if on_kernel is not None:
                on_kernel(len(found), len(names))
    return replace(advice, kernels=tuple(found[problem] for problem in names)).with_plan()


def require_live(config: Config) -> None:
    """Refuse settings that name a recording.

    Raises:
        ConfigError: the settings name a recording.
    """
    if config.is_replayed:
        raise ConfigError(
            "advice is about this machine, and the settings name a recording; leave out "
            "backend='recorded' and device"
        )


@dataclass
class _Trials:
    """Runs a step in as many ways as there is time for: `_MOST_S` seconds, counted from `began`."""

    model: nn.Module
    inputs: Any
    backend: AbstractBackend
    config: Config
    began: float
    is_dry: bool = False
    ways: list[Way] = field(default_factory=list)
    largest: dict[str, Largest] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    profile: StepProfile | None = None
    search: SegmentSearch | None = None
    spread: float = 0.0
    float32: Way | None = None
    compiled: CompiledWays | None = None
    is_emulated: bool = False

    def __post_init__(self) -> None:
        self.is_training = self.config.ops != ("fprop",)
        # Steps on the copy of the model in a layout.
        self._copy = cache(partial(Steps, self.model, self.inputs, self.is_training))
        several = self.inputs if isinstance(self.inputs, list) else [self.inputs]
        self.is_single = len(several) == 1
        self.example = several[0]
        self.batch = batch_of(self.example)
        self.own_ns = 0

    def advice(self, has_other: bool) -> Advice:
        """The advice from all trials, channels_last too if `has_other`; kernels are added later."""
        device = self.backend.device()
        reason = reason_against_steps(self.model, self.inputs, device.type)
        if reason:
            return Advice((), device, reason=reason)
        self._note_load()
        self.loads.clear()
        budget = None
        try:
            with undisturbed(self.model):
                with self._trying(FLOAT32):
                    self._try_float32()
                if not self.is_emulated:
                    self._as_it_is()
                    self._all_ways(has_other)
                    with self._trying(COMPILED):
                        self._try_compiled()
                    budget = self.budget_bytes
                    if budget is not None and self.is_single and self.batch:
                        self._find_largest(budget)
                    elif budget is not None:
                        self.left_out.append(
                            "the largest batch (it takes one example with a batch)"
                        )
                    self._race()
        # A model that was traced on fake tensors may still fail on real ones. Its kernels can be
        # timed all the same.
        except STEP_ERRORS as error:
            if not self.ways:
                reason = f"one could not be computed ({first_line(error)})"
                self.left_out.clear()
            else:
                self.left_out.append(f"whatever follows ({first_line(error)})")
        profile = self.profile
        return Advice(
            kernels=(),
            device=device,
            ways=tuple(self.ways),
            causes=() if profile is None else profile.memory(budget or 0, self.is_training).causes,
            batch=self.batch,
            is_training=self.is_training,
            budget_bytes=budget,
            own_peak_bytes=0 if profile is None else profile.own_peak_bytes,
            load=round(mean(self.loads), 1) if self.loads else 0.0,
            spread=self.spread,
            left_out=tuple(self.left_out),
            reason=reason,
            largest=self.largest,
        )

    def _note_load(self) -> None:
        self.loads.append(self.backend.state().load)

    @contextmanager
    def _trying(self, name: str) -> Iterator[None]:
        """Note a way as left out if it fails inside this context."""
        try:
            yield
        except STEP_ERRORS as error:
            self.left_out.append(f"{name} ({first_line(error)})")
        self._note_load()

    def _has_time(self, name: str, steps: int, part: float = _TRIALS_PART) -> bool:
        """True if `steps` more steps fit `part` of `_MOST_S`; else `name` is noted as left out."""
        if self._end(part).has_time(steps, self.own_ns):
            return True
        self.left_out.append(f"{name} (no time)")
        return False

    def _end(self, part: float) -> Deadline:
        """When this part of the time is over."""
        return Deadline(self.began + part * _MOST_S)

    def _context(self, name: str) -> AbstractContextManager[object]:
        """Context in which to foresee and run a way."""
        if name != FLOAT32:
            return nullcontext()
        return torch.autocast(self.backend.device().type, enabled=False)

    def _try_float32(self) -> None:
        """Under autocast, time a step in float32 and one as it is, before all else."""
        if self.is_dry or not torch.is_autocast_enabled(self.backend.device().type):
            return
        # Operators are not called: those of a very slow step would take twice its time.
        peaks = Foreseer(self.model, self.inputs, self.backend, self.is_training, operators="none")
        profile = peaks.step()
        with self._context(FLOAT32):
            peak = replace(peaks).step().peak_bytes
            if not peaks.can_run(max(peak, profile.peak_bytes)):
                self.left_out.append(f"{FLOAT32} (it needs {format_bytes(peak)}, foreseen)")
                return
            time_ns = self._run("keep")
        self.float32 = Way("torch", FLOAT32, peak, time_ns=time_ns)
        self.own_ns = self._run("keep")
        if self.own_ns < EMULATED * time_ns:
            return
        self.is_emulated, self.profile = True, profile
        own = Way("torch", AS_IT_IS, profile.peak_bytes, time_ns=self.own_ns)
        self.ways += own, self.float32
        self.left_out.append(
            "other ways, kernels, workspace of the peaks (steps under autocast take too long)"
        )

    def _as_it_is(self) -> None:
        """Foresee the step as it is, and run it if it fits the memory."""
        self.foreseer = Foreseer(self.model, self.inputs, self.backend, self.is_training)
        self.profile = own = self.foreseer.step()
        self.own_ns = own.time_ns
        if self.is_single:
            self.search = SegmentSearch(self.foreseer, copy=partial(self._copy, "keep"))
        else:
            self.left_out.append("segments and micro-batches (one example at a time)")
        fits = self.foreseer.can_run(own.peak_bytes)
        self.budget_bytes = budget = self._budget(own)
        self.may_run = not self.is_dry and fits and (budget is None or own.peak_bytes <= budget)
        if self.may_run:
            self.own_ns = self._run("keep")
        elif not self.is_dry:
            self.left_out.append(
                f"the step as it is (it needs {format_bytes(own.peak_bytes)}, foreseen)"
            )
        time_ns = self.own_ns if self.may_run else 0
        self.ways.append(Way("torch", AS_IT_IS, own.peak_bytes, own.time_ns, time_ns=time_ns))
        if self.float32 is not None:
            with self._context(FLOAT32):
                found = replace(self.foreseer).step()
            self.ways.append(replace(self.float32, foreseen_bytes=found.peak_bytes))

    def _run(self, layout: str) -> int:
        """Time of a second step in a layout, or of the first one if steps are very long."""
        first = self._elapsed_ns(layout)
        return first if 3 * first > 1e10 else self._elapsed_ns(layout)

    def _elapsed_ns(self, layout: str, division: StepDivision = WHOLE) -> int:
        if division.compiled is not None and self.compiled is not None:
            return self.backend.elapsed_ns(self.compiled.steps)
        steps = self._copy(layout)
        steps.divide(division)
        return self.backend.elapsed_ns(steps)

    def _add(self, name: str, way: Way) -> None:
        if all(one.division != way.division and one.name != name for one in self.ways):
            self.ways.append(replace(way, name=name))

    def _all_ways(self, has_other: bool) -> None:
        """Try all ways, the most useful first."""
        search = self.search
        trials: dict[str, Callable[[], None]] = {}
        if search is not None:
            search.is_dry = self.is_dry
            name = "loop" if self.is_training else "micro-batches"
            trials[name] = partial(self._try_sizes, search, name)
            for share in _SHARES:
                trials[f"segments at {share:.0%}"] = partial(self._try_segments, search, share)
            if self.is_training:
                trials[BLOCKS] = partial(self._try_blocks, search)
        # channels_last is third: after the two most useful ways to save memory, before the others.
        names = [*trials]
        if has_other:
            trials[CHANNELS_LAST] = self._try_channels_last
            names.insert(2, CHANNELS_LAST)
        for place, name in enumerate(names):
            if search is not None:
                search.deadline = self._end(_TRIALS_PART).part(1 / (len(names) - place))
            with self._trying(name):
                trials[name]()

    def _try_blocks(self, search: SegmentSearch) -> None:
        """Try a step in which each block is recomputed as a whole."""
        if self._has_time(BLOCKS, _TRIAL_STEPS):
            way = search.in_blocks()
            ran = None if way is None else search.run_if_fits(way)
            if ran is not None:
                self._add(BLOCKS, ran)
            elif way is not None:
                self.left_out.append(f"{BLOCKS} (a step fails)")

    def _try_sizes(self, search: SegmentSearch, name: str) -> None:
        """Try the whole model in micro-batches of several sizes."""
        # This way is the most useful one, so it gets time for some steps even if these are long.
        needed = Deadline.within(_FIRST_STEPS * self.own_ns / 1e9)
        search.begin(max(search.deadline, needed))
        reason = search.reason_against_parts()
        if reason:
            self.left_out.append(f"{name} ({reason.removeprefix('of this model ')})")
            return
        if self.is_training:
            search.in_parts()
        else:
            search.try_sizes()
        found = [one for one in search.ways if one.division != WHOLE and _is_of_model(one)]
        tried = [one for one in found if one.time_ns or self.is_dry]
        if not tried:
            self.left_out.append(f"{name} (no time)")
            return
        fastest = min(tried, key=lambda way: way.step_ns)
        affordable = [way for way in tried if way.step_ns <= _SLOWER * fastest.step_ns]
        for way in dict.fromkeys((fastest, min(affordable, key=lambda way: way.foreseen_bytes))):
            segments, part, _ = way.division
            self._add(f"{name} of {part or segments[0].micro_batch}", way)

    def _try_segments(self, search: SegmentSearch, share: float) -> None:
        """Try segments with a peak of at most this share of the peak of the step as it is."""
        own, name = self.ways[0].most_bytes, f"segments at {share:.0%}"
        limit = int(share * own)
        # Segments that were found for a larger share may have a peak within this share, too. Then
        # no search is needed.
        names = "segments", "slabs"
        done = [way.foreseen_bytes for way in self.ways if way.name.startswith(names)]
        if share < _SHARES[0] and any(peak <= limit for peak in done):
            return
        part = 1.0 if share == _SHARES[0] else _TRIALS_PART
        if not self._has_time(name, _SEARCH_STEPS, part):
            return
        way = search.within(limit)
        found = f"{way.foreseen_bytes / own:.0%}"
        if way.foreseen_bytes > limit:
            self.left_out.append(
                f"{name} (the smallest peak that was found by torch's own convolutions is {found}; "
                f"a plan may need less)"
            )
        if way.division != WHOLE:
            rows = sorted({one.rows for one in way.division.segments if one.rows is not None})
            many = f"{rows[0]} to {rows[-1]}" if len(rows) > 1 else "".join(map(str, rows))
            self._add(
                f"{f'slabs of {many} rows' if rows else 'segments'}, {found} of the peak", way
            )

    def _try_channels_last(self) -> None:
        """Try the step in channels_last."""
        name = CHANNELS_LAST
        if self._has_time(name, _TRIAL_STEPS, _STEPS_PART):
            found = self.foreseer.step(memory_format=name)
            time_ns = self._run(name) if self.may_run else 0
            way = Way("torch", name, found.peak_bytes, found.time_ns, time_ns=time_ns)
            self.ways.append(replace(way, memory_format=name))

    def _try_compiled(self) -> None:
        """Try compiled steps, in the faster layout; the time for that is beside all other time."""
        if not self.may_run or is_compiled(self.model) or self.own_ns < _LEAST_COMPILED_NS:
            return
        began, own = monotonic(), self.profile
        assert own is not None
        how = self.model, self.inputs, self.config, self.backend
        ways = CompiledWays(*how, own.held.total, own.traced.problems)
        whole = [way for way in self.ways if way.division == WHOLE and way.name != FLOAT32]
        layout = min(whole, key=lambda way: way.step_ns).memory_format
        way = ways.attempt(StepDivision(compiled=1.0), layout)
        if way is None:
            [(_, reason)] = ways.compilation(is_chosen=False).left_out
            self.left_out.append(f"{COMPILED} ({reason})")
        else:
            self.compiled = ways
            where = "" if layout == "keep" else f" in {layout}"
            self._add(f"{COMPILED}{where}", way)
        self.began += monotonic() - began

    def _rivals(self, own: Way) -> list[Way]:
        """Ways to time in turn with the step as it is, the most promising first."""
        others = [way for way in self.ways[1:] if way.step_ns <= _SLOWER * own.time_ns]
        small = Advice((), self.backend.device(), tuple(self.ways)).smallest
        chosen = sorted(others, key=lambda way: way.step_ns)[: _MOST_RIVALS - 1]
        chosen += [] if small is None or small in chosen else [small]
        left_s = self._end(_STEPS_PART).left_s()
        count = int(left_s / (_ROUNDS * own.time_ns / 1e9)) - 1
        # Without a memory budget, a way that seems to be faster is raced even if time is short.
        is_hope = any(way.step_ns < own.time_ns for way in chosen[:1])
        return chosen[: max(is_hope and self.config.memory_budget is None, count)]

    def _race(self) -> None:
        """Time the promising ways in turn with the step as it is."""
        if not self.may_run:
            return
        own = self.ways[0]
        rivals = [way for way in self._rivals(own) if way.time_ns]
        if len(self.ways) > 1 and not rivals:
            self.left_out.append("timing ways in turn (no time)")
        end, faults = self._end(_STEPS_PART), list[int]()
        if rivals:
            steps = (_ROUNDS + 0.5) * (1 + len(rivals))
            end = max(end, Deadline.within(steps * own.time_ns / 1e9))
        elif not end.has_time(_ROUNDS, own.time_ns):
            return

        def run(way: Way) -> int:
            before = _faults()
            with self._context(way.name):
                time_ns = self._elapsed_ns(way.memory_format, way.division)
            faults.extend([_faults() - before] * (way is own))
            return time_ns

        times = race(
            [partial(run, way) for way in (own, *rivals)],
            lambda steps: not end.has_time(steps, own.time_ns),
            lambda samples: all(tells(one, samples[0]) for one in samples[1:]),
            # All ways have run already, so the first round need not warm them up.
            is_warm=True,
        )
        self._note_load()
        self.spread = round(spread_ns(times[0]) / median_ns(times[0]), 3)
        for way, raced in zip((own, *rivals), timed((own, *rivals), times), strict=True):
            self.ways[self.ways.index(way)] = raced
        self._foresee_malloc(median_ns(faults))

    def _foresee_malloc(self, faults: int) -> None:
        """Add an estimate of a step with a malloc that keeps blocks and saves page faults."""
        if self.backend.conditions().allocator != "glibc":
            return
        fresh = filling()
        saved_ns = faults * max(0, fresh.fresh_ns - fresh.reused_ns) / max(1, fresh.faults)
        own = self.ways[0]
        time_ns = max(1, round(own.time_ns - saved_ns))
        self.ways.append(Way("torch", MALLOC, own.most_bytes, time_ns))

    def _budget(self, own: StepProfile) -> int | None:
        """The memory budget in bytes; None: it is not set."""
        if self.config.memory_budget is None:
            return None
        free = self.foreseer.free_bytes
        return self.config.with_budget_of(own.peak_bytes, free, own.held.total).budget_bytes

    def _find_largest(self, budget: int) -> None:
        """Foresee each way's largest batch."""
        for way in self.ways:
            if way.division.compiled is not None:
                continue  # what compiled code takes is not foreseen
            with self._trying(f"the largest batch by {way.name}"), self._context(way.name):
                foreseer = replace(self.foreseer, operators="in part")
                peak_at = partial(_peak_at, foreseer, way.division, way.memory_format, None)
                batch, peak = largest_batch(peak_at, self.batch, budget)
                time_ns = way.step_ns * batch // self.batch
                self.largest[way.name] = Largest(batch, peak, time_ns)


def largest_batches(
    model: nn.Module,
    example_inputs: Any,
    plan: Plan | None,
    config: Config,
    limit: int,
    *,
    optimizer: str | None = None,
) -> dict[str, int]:
    """The largest batches of which a step fits a limit, foreseen.

    Without a plan, the segments are those by which the example has the smallest peak that is found
    in seconds; modules are examined on some of its samples.

    Args:
        model: as for `foresee`, like the next three.
        example_inputs: one example.
        plan: the plan.
        config: the settings.
        limit: bytes that a step may have allocated.
        optimizer: as for `foresee`.

    Returns:
        For each way in words, the number of samples; 0 if not even one fits.
    """
    (inputs,) = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    foreseer = foreseer_of(model, inputs, plan, config, optimizer, "in part")
    ways: dict[str, tuple[StepDivision, str, Plan | None]] = {"undivided": (WHOLE, "keep", None)}
    if plan is not None:
        ways["by the plan"] = plan.division, plan.memory_format, plan
    else:
        # A model may run on fake tensors and not be copied.
        with suppress(*STEP_ERRORS), undisturbed(model):
            search = SegmentSearch(foreseer, Deadline.within(_FITS_S))
            search.is_dry = True
            ways["in segments"] = search.within(1).division, "keep", None
    return {
        way: largest_batch(partial(_peak_at, foreseer, *how), foreseer.batch, limit)[0]
        for way, how in ways.items()
    }


def _peak_at(
    foreseer: Foreseer, division: StepDivision, layout: str, plan: Plan | None, batch: int
) -> int:
    """Foreseen peak of a step of another batch, in as many micro-batches if there is no plan."""

    def scaled(size: int | None) -> int | None:
        return None if size is None else max(1, -(-size * batch // foreseer.batch))

    if plan is None:
        segments = (replace(one, micro_batch=scaled(one.micro_batch)) for one in division.segments)
        division = StepDivision(tuple(segments), scaled(division.micro_batch))
    return foreseer.of_batch(batch).step(division, layout, plan, names=()).peak_bytes


def _is_of_model(one: Way) -> bool:
    """True if the whole model runs in micro-batches."""
    segments, micro_batch, _ = one.division
    whole = [each.module for each in segments if each.micro_batch is not None] == [""]
    return micro_batch is not None or whole


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _timed_kernel(
    backend: AbstractBackend, problem: Problem, layers: tuple[str, ...], until: float
) -> KernelAdvice:
    """Time one kernel by torch's own convolution, in both layouts.

    No run begins after the `time.monotonic` of `until`.
    """
    others = []
    if problem.rank > 1 and problem.layout == "nchw":
        others.append(replace(problem, layout="nhwc"))
    roofline = backend.roofline(problem.dtype)
    elements = sum(map(prod, (*problem.operand_shapes, problem.result_shape)))
    # A direct convolution reads both operands and writes the result once, without workspace.
    direct = Cost(problem.flops, elements * problem.bytes_per_element, 0)
    bounds = [
        least_ns((backend.cost(one, c.algorithm) for c in backend.candidates(one)), roofline)
        for one in (problem, *others)
    ]
    timing, *last = (_timed(backend, one, until) for one in (problem, *others))
    # A measured time below the lower bound shows that the bound is wrong, because the machine was
    # busy when its peak rates were measured. Then no bound is given.
    seen = min((each.time_ns for each in (timing, *last) if each), default=0)
    return KernelAdvice(
        problem,
        layers,
        timing,
        last[0] if last else None,
        0 if roofline is None else roofline.time_ns(direct),
        min(bounds) if min(bounds) <= seen else 0,
    )


def _timed(backend: AbstractBackend, problem: Problem, until: float) -> Timing | None:
    if monotonic() >= until:
        return None
    try:
        run = backend.executable(problem, DEFAULT_ALGORITHM).alone
        call = partial(run, *backend.operands(problem, problem.batch))
        # The run by which workspace is measured also warms the kernel up.
        workspace = backend.workspace_bytes(call, [(problem, DEFAULT_ALGORITHM)])
        samples = [backend.elapsed_ns(call)]
        while len(samples) < _MOST_SAMPLES and sum(samples) < _ENOUGH_NS and monotonic() < until:
            samples.append(backend.elapsed_ns(call))
    # A kernel that cannot run, for example for lack of memory, is shown as not timed.
    except (RuntimeError, MemoryError, UnsupportedError):
        return None
    return Timing(median_ns(samples), spread_ns(samples), workspace, len(samples))
