"""Advice on a model: what fills the memory of a step, ways to run it, a verdict. Runs nothing.

"The step as it is" is a step of the unchanged model by torch: in its own layout, and undivided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from msgspec import to_builtins

from ucudnn.measurement import Device
from ucudnn.plan import Timing
from ucudnn.problem import Problem
from ucudnn.segment import WHOLE, StepDivision
from ucudnn.units import format_bytes, format_ns, format_sizes, parse_bytes
from ucudnn.verdict import ADVISED_GAIN, HIDDEN, LEAST_ROUNDS, TOLERATED

# A kernel is on a cliff if torch takes at least this many times as long as the roofline gives for a
# direct convolution. Good kernels do not reach the roofline either, so the factor is large.
_CLIFF = 5.0
# A kernel is also on a cliff if torch takes at least this many times as long for it as in
# channels_last. Both times are measured, so a smaller factor is enough.
_LAYOUT_CLIFF = 2.0
# Savings of less than this fraction of a step's peak are not worth tuning for.
_WORTHWHILE_MEMORY = 0.1
# A way to run the step is recommended for saving memory if, compared with the step as it is, its
# peak is at most `_SMALL` times as large and its time at most `_AFFORDABLE` times as long. If all
# ways with such a small peak take longer, the one with the smallest peak is recommended.
_SMALL, _AFFORDABLE = 0.75, 1.25
# The workspace limit that is suggested is large enough for kernels that take this fraction of the
# time of all convolutions.
_UNTOUCHED = 0.8
# Times are noisy if their interquartile range is more than this fraction of their median.
_NOISY = 0.1
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KernelAdvice:
    """One convolution of the step as torch runs it.

    Args:
        problem: what is computed.
        layers: names of the layers, one per call.
        timing: timing of one call; None if the kernel was not timed.
        channels_last: timing of one call in channels_last; None if such a call was not timed: for
            lack of time, or because the problem is in channels_last already or is 1-D.
        direct_ns: time of a direct convolution at the full speed of the machine; 0: not known.
        least_ns: lower bound of the time of one call by any algorithm; 0: not known.
    """

    problem: Problem
    layers: tuple[str, ...]
    timing: Timing | None
    channels_last: Timing | None
    direct_ns: int
    least_ns: int

    def time_ns(self) -> int:
        """Time of all calls; 0 if it is not known."""
        return 0 if self.timing is None else self.timing.time_ns * len(self.layers)

    def gain_ns(self) -> int:
        """Upper bound of the time that other algorithms could save in all calls; 0: not known."""
        # Without a lower bound of the kernel's time, it is not known how much could be saved.
        if not self.least_ns:
            return 0
        # A kernel that was not timed counts as 0 ns, and its gain as 0.
        return max(0, self.time_ns() - self.least_ns * len(self.layers))

    def excess_ns(self) -> int:
        """Time that all calls lose because the kernel is on a cliff; 0 if it is not."""
        if not self.is_cliff():
            return 0
        # The kernel is compared with the slower of its two references (the roofline and
        # channels_last), so that the loss is not overstated.
        in_other_layout = 0 if self.channels_last is None else self.channels_last.time_ns
        least = max(self.direct_ns, in_other_layout) * len(self.layers)
        return max(0, self.time_ns() - least)

    def is_cliff(self) -> bool:
        """True if torch's own kernel is far slower than it should be."""
        timing, other = self.timing, self.channels_last
        if timing is None:
            return False
        if other is not None and timing.time_ns >= _LAYOUT_CLIFF * other.time_ns:
            return True
        return bool(self.direct_ns) and timing.time_ns >= _CLIFF * self.direct_ns


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest batch with which a step by one way fits a memory budget.

    Args:
        batch: number of samples; 0 if not even one sample fits.
        peak_bytes: peak of a step of that batch.
        time_ns: time of that step.
        is_estimated: True if peak and time are estimates; False if such a step was run.
    """

    batch: int
    peak_bytes: int
    time_ns: int
    is_estimated: bool = True

    @property
    def sample_ns(self) -> int:
        """Time per sample."""
        return self.time_ns // max(1, self.batch)

    def __str__(self) -> str:
        return f"{'~' * self.is_estimated}{self.batch}"


@dataclass(frozen=True, slots=True)
class WayAdvice:
    """One way to run the step.

    Args:
        name: name of the way in the table.
        how: what a user must do to run steps this way, as an imperative.
        peak_bytes: peak of a step, including what is allocated before it.
        time_ns: time of a step; the median if several steps were timed.
        ratio: time of this way divided by the time of the step as it is, with the 95 % interval;
            None if the two steps were not timed in turn.
        rounds: number of rounds in which the two steps were timed in turn.
        is_estimated: True if peak and time are estimates; False if such a step was run.
        memory_format: "keep" or "channels_last".
        division: segments and micro-batches of the step.
        largest: the largest batch that fits the memory budget; None if there is no budget or the
            batch is not known.
    """

    name: str
    how: str
    peak_bytes: int
    time_ns: int
    ratio: tuple[float, float, float] | None = None
    rounds: int = 0
    is_estimated: bool = False
    memory_format: str = "keep"
    division: StepDivision = WHOLE
    largest: Largest | None = None

    @property
    def is_loop(self) -> bool:
        """True if this way changes the training loop."""
        return self.division.micro_batch is not None

    @property
    def is_faster(self) -> bool:
        """True if this way was faster than the step as it is, beyond the noise."""
        known = self.ratio is not None and self.rounds >= LEAST_ROUNDS
        return known and self.ratio is not None and self.ratio[2] < 1 - TOLERATED

    def factor(self, own_ns: int) -> float:
        """Time of this way divided by the time of the step as it is."""
        return self.time_ns / own_ns if self.ratio is None else self.ratio[0]

    def price(self, own_ns: int) -> str:
        """`factor` as text, with its interval if there were several rounds; `~`: estimated."""
        if self.ratio is not None and self.rounds > 1:
            return "{:.2f} ({:.2f} to {:.2f})".format(*self.ratio)
        mark = "~" if self.is_estimated else ""
        return f"{mark}{self.factor(own_ns):.2f}"


@dataclass(frozen=True, slots=True)
class Advice:
    """The memory of a step, the ways to run it, its kernels, and a verdict.

    `print(advice)` shows the verdict and the ways; `ucudnn advise --all` also shows the kernels.

    Args:
        kernels: one per distinct convolution, in the order of the model.
        device: the device that was measured.
        ways: the ways to run the step, the step as it is first; empty if no step was run.
        causes: parts of the peak of the step as it is, (purpose, bytes); empty if unknown.
        batch: samples of the step.
        is_training: True for forward and backward; False for forward only.
        budget_bytes: memory budget of a step; None: no budget.
        own_peak_bytes: peak of the step as it is, without workspace; 0: not known.
        load: average number of processors that other processes used while steps ran.
        spread: interquartile range of the times of the step as it is, divided by their median.
        left_out: ways that were not tried, with the reason.
        reason: why no step was run; "" if a step was run.
    """

    kernels: tuple[KernelAdvice, ...]
    device: Device
    ways: tuple[WayAdvice, ...] = ()
    causes: tuple[tuple[str, int], ...] = ()
    batch: int = 0
    is_training: bool = True
    budget_bytes: int | None = None
    own_peak_bytes: int = 0
    load: float = 0.0
    spread: float = 0.0
    left_out: tuple[str, ...] = ()
    reason: str = ""

    @property
    def step_ns(self) -> int:
        """Time of the step as it is; 0 if no step was run."""
        return self.ways[0].time_ns if self.ways else 0

    @property
    def step_peak_bytes(self) -> int:
        """Peak of the step as it is, with what is allocated before it; 0 if no step was run."""
        return self.ways[0].peak_bytes if self.ways else 0

    @property
    def convolutions_ns(self) -> int:
        """Time of all convolutions of a step in the model's own layout."""
        return sum(kernel.time_ns() for kernel in self.kernels)

    @property
    def fastest(self) -> WayAdvice | None:
        """The fastest way, if it is faster than the step as it is beyond the noise; else None."""
        faster = [way for way in self.ways if way.is_faster]
        if not faster:
            return None
        ends = {way.name: way.ratio for way in faster if way.ratio is not None}
        least = min(faster, key=lambda way: ends[way.name][0])
        # Ways whose confidence intervals overlap the interval of the fastest way count as equally
        # fast. Of these, the way with the smallest peak is taken.
        level = [way for way in faster if ends[way.name][1] <= ends[least.name][2]]
        return min(level, key=lambda way: (way.peak_bytes, ends[way.name][0]))

    @property
    def is_noisy(self) -> bool:
        """True if other processes used processors, or the step as it is varied by over 10 %."""
        return self.load > 0 or self.spread > _NOISY

    def share(self, time_ns: int) -> float:
        """A time as a fraction of the step's time, or of the convolutions' if no step was run."""
        # Kernels are timed one by one, so with noise their sum may exceed the time of the step.
        whole = max(self.step_ns, self.convolutions_ns)
        return time_ns / whole if whole else 0.0

    @property
    def suggested_limit(self) -> int | None:
        """A workspace limit in bytes that lowers the peak and affects few kernels, or None."""
        known = [
            (kernel.timing.workspace_bytes, kernel.time_ns())
            for kernel in self.kernels
            if kernel.timing
        ]
        limit, peak = _limit_for(known), self.step_peak_bytes
        if not self.own_peak_bytes or not limit:
            return None
        saved = peak - self.own_peak_bytes - limit
        return limit if saved >= _WORTHWHILE_MEMORY * peak else None

    def with_plan(self) -> Advice:
        """This advice with one more way: a plan for the convolutions, estimated from kernels."""
        if not self.ways or not any(kernel.timing for kernel in self.kernels):
            return self
        limit, peak = self.suggested_limit, self.step_peak_bytes
        excess = self.share(sum(kernel.excess_ns() for kernel in self.kernels))
        setting = ""
        if limit is not None:
            setting = f" with workspace_limit='{format_bytes(limit).replace(' ', '')}'"
            peak = min(peak, self.own_peak_bytes + limit)
        plan = WayAdvice(
            "plan for the convolutions",
            f"tune it{setting}",
            *(peak, round(self.step_ns * (1 - excess))),
            is_estimated=True,
        )
        return replace(self, ways=(*self.ways, plan))

    @property
    def verdict(self) -> str:
        """The recommendation: one sentence, or up to three with a memory budget."""
        if self.budget_bytes is not None and any(way.largest for way in self.ways):
            return self._on_budget(self.budget_bytes)
        advised = [*self._on_time(), *self._on_memory()]
        if not advised and self.left_out and all(way.is_estimated for way in self.ways[1:]):
            return "not known: nothing but the step as it is was run."
        if not advised:
            return (
                "leave it as it is: no way that was tried is faster beyond the noise or takes much "
                "less memory."
            )
        return f"{'; '.join(advised)}."

    def _on_time(self) -> Iterator[str]:
        """Clauses of the verdict on time: what makes steps shorter, or what noise may hide."""
        best = self.fastest
        # Another layout, micro-batches and segments change what kernels compute. So if such a way
        # is faster, the verdict does not mention cliffs, which are of the step as it is.
        if best is not None:
            size, own = format_sizes(best.peak_bytes, self.step_peak_bytes)
            yield (
                f"{best.how}: a step then takes {best.price(self.step_ns)} times as long and "
                f"{size} instead of {own}"
            )
            return
        cliffs = [kernel for kernel in self.kernels if kernel.is_cliff()]
        gain = self.share(sum(kernel.excess_ns() for kernel in cliffs))
        if gain >= ADVISED_GAIN:
            what = "1 kernel is" if len(cliffs) == 1 else f"{len(cliffs)} kernels are"
            yield (
                f"tune it without a limit: {what} on a cliff, which costs up to {gain:.0%} of the "
                f"step"
            )
        else:
            yield from self._on_noise()

    def _on_noise(self) -> Iterator[str]:
        """Clauses of the verdict on ways that may be faster, which noise or few steps hide."""
        own, raced = self.step_ns, [way for way in self.ways[1:] if way.ratio is not None]
        known = raced or [way for way in self.ways[1:] if not way.is_estimated]
        hopes = [
            way
            for way in known
            if way.factor(own) < 1 - ADVISED_GAIN or (way.ratio and way.ratio[1] < HIDDEN)
        ]
        if hopes:
            hope = min(hopes, key=lambda way: way.factor(own))
            why = "too noisy" if hope.rounds >= LEAST_ROUNDS else "too few steps"
            yield (
                f"{why} to tell whether {hope.name} is faster: {hope.price(own)} times as long as "
                f"it is"
            )
            return
        for way in self.ways[1:]:
            if way.is_estimated and way.how.startswith("start") and way.factor(own) < _SMALL:
                yield f"{way.how}: a step may then take {way.price(own)} times as long"

    def _on_memory(self) -> Iterator[str]:
        """What to do for less memory."""
        best, small = self.fastest, self.smallest
        # If the fastest way needs no more memory than this one, it is advised already.
        if small is None or (best is not None and best.peak_bytes <= small.peak_bytes):
            return
        about = "about " if small.rounds < LEAST_ROUNDS else ""
        size, own = format_sizes(small.peak_bytes, self.step_peak_bytes)
        yield (
            f"if memory is short, {small.how}: {size} instead of {own} at "
            f"{about}{small.price(self.step_ns)} times the time"
        )

    @property
    def smallest(self) -> WayAdvice | None:
        """A way to advise if memory is short, one that was run if possible; None: all are large."""
        most = _SMALL * self.step_peak_bytes
        small = [way for way in self.ways if way.peak_bytes <= most and not way.is_estimated]
        if not small and self.suggested_limit is not None:  # a plan with this limit saves enough
            small = [way for way in self.ways if way.peak_bytes < self.step_peak_bytes]
        cheap = [way for way in small if way.factor(self.step_ns) <= _AFFORDABLE]
        return min(cheap or small, key=lambda way: way.peak_bytes, default=None)

    @property
    def roomiest(self) -> WayAdvice | None:
        """The way with the largest batch; a loop only if no other way fits even one sample."""
        found = [way for way in self.ways if way.largest is not None and way.largest.batch]
        kept = [way for way in found if not way.is_loop] or found
        return max(kept, key=_room, default=None)

    def _on_budget(self, budget: int) -> str:
        """The verdict on a budget: the largest batch that fits, its way and its time per sample."""
        found = [(way, way.largest) for way in self.ways if way.largest is not None]
        if not any(largest.batch for _, largest in found):
            size, least = format_sizes(budget, min(way.peak_bytes for way, _ in found))
            return (
                f"not even one sample fits {size} by any way that was tried; the smallest peak at "
                f"batch {self.batch} is {least}."
            )
        way = self.roomiest
        assert way is not None
        assert way.largest is not None
        most = way.largest
        size, peak = format_sizes(budget, most.peak_bytes)
        # A share in `how` is of the peak at the batch that was given, not at the largest batch. By
        # the budget itself, `tune` divides steps of any batch.
        looped = "loop=True and " if way.is_loop else ""
        how = f"tune it with {looped}{_setting(budget)}" if way.division != WHOLE else way.how
        said = (
            f"the largest batch within {size} is {most}: {how}; {peak} and "
            f"{format_ns(most.sample_ns)} per sample, "
            f"{'estimated' if most.is_estimated else 'seen in a step'}."
        )
        own, at_own = found[0]
        if own is not way:
            said += f" As it is, {at_own} fit at {format_ns(at_own.sample_ns)} per sample."
        loops = [one for one in found if one[0].is_loop and one[0] is not way]
        if loops:
            loop, at_loop = max(loops, key=lambda one: _room(one[0]))
            said += f" By a {loop.name} {at_loop} fit at {format_ns(at_loop.sample_ns)} per sample."
        return said

    def sentences(self) -> list[str]:
        """The verdict, then at most 25 lines that say what it is based on."""
        lines = [f"Verdict: {self.verdict}", *self._memory_lines(), *self._table()]
        if self.reason:
            lines.append(f"No step was run: {self.reason}.")
        if self.is_noisy and self.ways:
            lines.append(
                f"Times are noisy: others used {self.load:.1f} processors meanwhile, and the step "
                f"as it is varied by {self.spread:.0%}. Run it again on a quiet machine."
            )
        if self.left_out:
            lines.append(f"Not tried: {'; '.join(self.left_out)}.")
        return [*lines, *self._kernel_lines()]

    def _memory_lines(self) -> Iterator[str]:
        if not self.causes:
            return
        kind = "A training step" if self.is_training else "An inference"
        peak = self.step_peak_bytes
        parts = ", ".join(
            f"{format_bytes(size)} of {what} ({size / peak:.0%})"
            for what, size in sorted(self.causes, key=lambda cause: -cause[1])
            if size
        )
        yield f"{kind} at batch {self.batch} has up to {format_bytes(peak)} allocated: {parts}."
        sizes = dict(self.causes)
        if self.is_training and not sizes.get("optimiser state") and sizes.get("parameters"):
            adam = format_bytes(2 * sizes["parameters"])
            yield f"It has no optimiser yet; the state of Adam would add {adam}."

    def _table(self) -> Iterator[str]:
        """The table of the ways: a heading, one line per way, and a legend."""
        if not self.ways:
            return
        has_budget = any(way.largest for way in self.ways)
        headings = ("largest batch", "per sample") if has_budget else ("times as long", "")
        yield f"{'':31}{'peak':>10}{'step':>10}  {headings[0]:<20}{headings[1]}".rstrip()
        for number, way in enumerate(self.ways):
            mark = "~" if way.is_estimated else ""
            cells = way.price(self.step_ns) if number else "1", ""
            if has_budget:
                most = way.largest
                cells = ("-", "") if most is None else (str(most), format_ns(most.sample_ns))
            peak, time = format_bytes(way.peak_bytes), format_ns(way.time_ns)
            yield (
                f"{way.name:31}{mark + peak:>10}{mark + time:>10}  {cells[0]:<20}{cells[1]}"
            ).rstrip()
        yield (
            "~: estimated, not run. A ratio without an interval is of one step."
            if not has_budget
            else "~: estimated, not run. The peak is at the batch that was given."
        )

    def _kernel_lines(self) -> Iterator[str]:
        untimed = sum(kernel.timing is None for kernel in self.kernels)
        if untimed == len(self.kernels):
            yield f"Convolutions: {untimed} kernels, none of which was timed."
            return
        cliffs = sum(kernel.is_cliff() for kernel in self.kernels)
        bound = ""
        if any(kernel.least_ns for kernel in self.kernels):
            gain = self.share(sum(kernel.gain_ns() for kernel in self.kernels))
            bound = f", and no plan can save more than {gain:.0%} of the step"
        part = f" {self.share(self.convolutions_ns):.0%} of the step," if self.ways else ""
        yield (
            f"Convolutions: {len(self.kernels)} kernels,{part} {cliffs} on a cliff, {untimed} not "
            f"timed{bound}."
        )

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def to_dict(self) -> dict[str, Any]:
        """The whole advice as JSON values."""
        values = to_builtins(replace(self, kernels=()))
        for fields, way in zip(values["ways"], self.ways, strict=True):
            segments, micro_batch = fields.pop("division")
            fields.update(segments=segments, micro_batch=micro_batch, is_faster=way.is_faster)
        values["kernels"] = [
            {
                **to_builtins(kernel),
                "problem": asdict(kernel.problem),
                "share": round(self.share(kernel.time_ns()), 4),
                "is_cliff": kernel.is_cliff(),
            }
            for kernel in self.kernels
        ]
        return {
            **values,
            "causes": dict(self.causes),
            "device": str(self.device),
            "step_ns": self.step_ns,
            "step_peak_bytes": self.step_peak_bytes,
            "is_noisy": self.is_noisy,
            "suggested_limit": self.suggested_limit,
            "verdict": self.verdict,
        }


def _room(way: WayAdvice) -> tuple[int, int]:
    """Sort key, greater for a larger batch, and at equal batches for less time per sample."""
    assert way.largest is not None
    return way.largest.batch, -way.largest.sample_ns


def _setting(budget: int) -> str:
    """The setting of a memory budget, as a size that is not rounded.

    >>> _setting(4 << 20), _setting(1025)
    ("memory_budget='4MiB'", "memory_budget='1025B'")
    """
    text = format_bytes(budget).replace(" ", "")
    return f"memory_budget='{text if parse_bytes(text) == budget else f'{budget}B'}'"


def _limit_for(known: Iterable[tuple[int, int]]) -> int:
    """The least workspace limit that is enough for kernels with `_UNTOUCHED` of the time.

    It is a multiple of 1 MiB. `known` has the workspace in bytes and the time in ns of each kernel.
    """
    known = sorted(known)
    total, taken = sum(time_ns for _, time_ns in known), 0
    # The kernels come in order of workspace. Those that need no more than the limit keep torch's
    # own convolution, so their time is not affected.
    for size, time_ns in known:
        taken += time_ns
        if taken >= _UNTOUCHED * total:
            # Kernels may need no workspace at all, and a limit of 0 would be no useful setting.
            return max(1, ceil(size / _MIB)) * _MIB
    return 0
