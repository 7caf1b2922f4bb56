"""Advice on a model: what fills the memory of a step, ways to run it, a verdict. Runs nothing.

"The step as it is" is a step of the unchanged model by torch: in its own layout, and undivided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from typing import Any

from msgspec import to_builtins

from ucudnn.measurement import Device
from ucudnn.outcomes import Way
from ucudnn.plan import Timing
from ucudnn.problem import Problem
from ucudnn.segment import WHOLE
from ucudnn.units import format_bytes, format_ns, format_ratio, format_sizes, parse_bytes
from ucudnn.verdict import ADVISED_GAIN, EMULATED, HIDDEN, LEAST_ROUNDS, TOLERATED, is_faster

# A value of GLIBC_TUNABLES with which glibc reuses the memory of freed blocks below 1 GiB.
LARGE_THRESHOLD_TUNABLES = (
    "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296"
)
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
# Names of ways, and what a user must do for those of which the name alone says it.
AS_IT_IS, CHANNELS_LAST, FLOAT32 = "as it is", "channels_last", "float32"
BLOCKS, MALLOC = "checkpoint per block", "malloc that keeps blocks"
COMPILED = "compiled"
_HOW = {
    AS_IT_IS: "leave it as it is",
    CHANNELS_LAST: "use channels_last",
    FLOAT32: "leave autocast out",
    BLOCKS: "checkpoint each block",
    MALLOC: f"start Python with GLIBC_TUNABLES={LARGE_THRESHOLD_TUNABLES}",
}


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
    """The largest batch with which a step by one way fits a memory budget, as is foreseen.

    Args:
        batch: number of samples; 0 if not even one sample fits.
        peak_bytes: peak of a step of that batch.
        time_ns: time of that step.
    """

    batch: int
    peak_bytes: int
    time_ns: int

    @property
    def sample_ns(self) -> int:
        """Time per sample."""
        return self.time_ns // max(1, self.batch)

    def __str__(self) -> str:
        return f"~{self.batch}"


@dataclass(frozen=True, slots=True)
class Advice:
    """The memory of a step, the ways to run it, its kernels, and a verdict.

    `print(advice)` shows the verdict and the ways; `ucudnn advise --all` also shows the kernels.

    Args:
        kernels: one per distinct convolution, in the order of the model.
        device: the device that was measured.
        ways: the ways to run the step, the step as it is first; their names differ; empty if no
            step was run. A way without a measured time is an estimate.
        causes: parts of the peak of the step as it is, (purpose, bytes); empty if unknown.
        batch: samples of the step.
        is_training: True for forward and backward; False for forward only.
        budget_bytes: memory budget of a step; None: no budget.
        own_peak_bytes: peak of the step as it is, without workspace; 0: not known.
        load: average number of processors that other processes used while steps ran.
        spread: interquartile range of the times of the step as it is, divided by their median.
        left_out: ways that were not tried, with the reason.
        reason: why no step was run; "" if a step was run.
        largest: by the name of a way, the largest batch that fits the budget; empty if there is no
            budget.
    """

    kernels: tuple[KernelAdvice, ...]
    device: Device
    ways: tuple[Way, ...] = ()
    causes: tuple[tuple[str, int], ...] = ()
    batch: int = 0
    is_training: bool = True
    budget_bytes: int | None = None
    own_peak_bytes: int = 0
    load: float = 0.0
    spread: float = 0.0
    left_out: tuple[str, ...] = ()
    reason: str = ""
    largest: Mapping[str, Largest] = field(default_factory=dict)

    @property
    def step_ns(self) -> int:
        """Time of the step as it is; 0 if no step was run."""
        return self.ways[0].step_ns if self.ways else 0

    @property
    def step_peak_bytes(self) -> int:
        """Peak of the step as it is, with what is allocated before it; 0 if no step was run."""
        return self.ways[0].most_bytes if self.ways else 0

    @property
    def convolutions_ns(self) -> int:
        """Time of all convolutions of a step in the model's own layout."""
        return sum(kernel.time_ns() for kernel in self.kernels)

    @property
    def fastest(self) -> Way | None:
        """The fastest way, if it is faster than the step as it is beyond the noise; else None."""
        faster = [way for way in self.ways if _is_faster(way)]
        least = min(faster, key=lambda way: way.ratio, default=None)
        # Ways whose confidence intervals overlap the interval of the fastest way count as equally
        # fast. Of these, the way with the smallest peak is taken.
        level = [way for way in faster if least and way.low <= least.high]
        return min(level, key=lambda way: (way.most_bytes, way.ratio), default=None)

    @property
    def faster_float32(self) -> Way | None:
        """The step in float32, if one under autocast takes ten times as long or more; else None."""
        known = (way for way in self.ways if way.name == FLOAT32)
        return next((way for way in known if EMULATED * way.step_ns <= self.step_ns), None)

    def factor(self, way: Way) -> float:
        """Time of a way divided by the time of the step as it is."""
        return way.ratio if way.rounds else way.step_ns / self.step_ns

    def price(self, way: Way) -> str:
        """`factor` as text, with its interval if there were several rounds; `~`: estimated."""
        if way.rounds > 1:
            return format_ratio(*way.ratios)
        return f"{'' if way.time_ns else '~'}{self.factor(way):.2f}"

    def how(self, way: Way) -> str:
        """What a user must do to run steps in a way, as an imperative."""
        if way.name in _HOW:
            return _HOW[way.name]
        if way.kind == "plan":
            limit = self.suggested_limit
            setting = "" if limit is None else f" with workspace_limit='{_compact(limit)}'"
            return f"tune it{setting}"
        segments, size, compiled = way.division
        if compiled is not None:
            layout = "" if way.memory_format == "keep" else " and layout='auto'"
            return f"let a plan compile it (tune it with compile='auto'{layout})"
        if size is not None:
            return f"train in a loop of micro-batches of {size} (tune it with loop=True)"
        if [one.module for one in segments if one.micro_batch is not None] == [""]:
            return f"run it in micro-batches of {segments[0].micro_batch} (tune does)"
        # By a budget, a step must be foreseen to fit and be measured to fit.
        most = max(way.foreseen_bytes, way.peak_bytes)
        share = ceil(100 * most / self.step_peak_bytes)
        return f"tune it with memory_budget='{share}%'"

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
        peak = peak if limit is None else min(peak, self.own_peak_bytes + limit)
        plan = Way("plan", "plan for the convolutions", peak, round(self.step_ns * (1 - excess)))
        return replace(self, ways=(*self.ways, plan))

    @property
    def verdict(self) -> str:
        """The recommendation: one sentence, or up to three with a memory budget."""
        if self.budget_bytes is not None and self.largest:
            return self._on_budget(self.budget_bytes)
        advised = [*self._on_time(), *self._on_memory()]
        if not advised and self.left_out and not any(way.time_ns for way in self.ways[1:]):
            return "not known: nothing but the step as it is was run."
        if not advised:
            return (
                "leave it as it is: no way that was tried is faster beyond the noise or takes much "
                "less memory."
            )
        return f"{'; '.join(advised)}."

    def _on_time(self) -> Iterator[str]:
        """Clauses of the verdict on time: what makes steps shorter, or what noise may hide."""
        best, float32 = self.fastest, self.faster_float32
        if float32 is not None:
            own, other = (format_ns(time_ns) for time_ns in (self.step_ns, float32.step_ns))
            yield (
                f"{self.how(float32)}: a step in float32 takes {self.factor(float32):.2g} times as "
                f"long, {other} instead of {own}"
            )
            return
        # Another layout, micro-batches and segments change what kernels compute. So if such a way
        # is faster, the verdict does not mention cliffs, which are of the step as it is.
        if best is not None:
            size, own = format_sizes(best.most_bytes, self.step_peak_bytes)
            yield (
                f"{self.how(best)}: a step then takes {self.price(best)} times as long and {size} "
                f"instead of {own}"
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
        raced = [way for way in self.ways[1:] if way.rounds]
        known = raced or [way for way in self.ways[1:] if way.time_ns]
        hopes = [way for way in known if self.factor(way) < 1 - ADVISED_GAIN or way.low < HIDDEN]
        if hopes:
            hope = min(hopes, key=self.factor)
            why = "too noisy" if hope.rounds >= LEAST_ROUNDS else "too few steps"
            yield (
                f"{why} to tell whether {hope.name} is faster: {self.price(hope)} times as long as "
                f"it is"
            )
            return
        for way in self.ways[1:]:
            if way.name == MALLOC and self.factor(way) < _SMALL:
                yield f"{self.how(way)}: a step may then take {self.price(way)} times as long"

    def _on_memory(self) -> Iterator[str]:
        """What to do for less memory."""
        best, small = self.fastest, self.smallest
        # If the fastest way needs no more memory than this one, it is advised already.
        if small is None or (best is not None and best.most_bytes <= small.most_bytes):
            return
        about = "about " if small.rounds < LEAST_ROUNDS else ""
        size, own = format_sizes(small.most_bytes, self.step_peak_bytes)
        yield (
            f"if memory is short, {self.how(small)}: {size} instead of {own} at "
            f"{about}{self.price(small)} times the time"
        )

    @property
    def smallest(self) -> Way | None:
        """A way to advise if memory is short, one that was run if possible; None: all are large."""
        most = _SMALL * self.step_peak_bytes
        small = [way for way in self.ways if way.most_bytes <= most and way.time_ns]
        if not small and self.suggested_limit is not None:  # a plan with this limit saves enough
            small = [way for way in self.ways if way.most_bytes < self.step_peak_bytes]
        cheap = [way for way in small if self.factor(way) <= _AFFORDABLE]
        return min(cheap or small, key=lambda way: way.most_bytes, default=None)

    @property
    def roomiest(self) -> Way | None:
        """The way with the largest batch; a loop only if no other way fits even one sample."""
        found = [way for way in self.ways if way.name in self.largest]
        found = [way for way in found if self.largest[way.name].batch]
        kept = [way for way in found if way.kind != "loop"] or found
        return max(kept, key=self._room, default=None)

    def _room(self, way: Way) -> tuple[int, int]:
        """Sort key, greater for a larger batch, and at equal batches for less time per sample."""
        most = self.largest[way.name]
        return most.batch, -most.sample_ns

    def _on_budget(self, budget: int) -> str:
        """The verdict on a budget: the largest batch that fits, its way and its time per sample."""
        way, found = self.roomiest, [way for way in self.ways if way.name in self.largest]
        if way is None:
            size, least = format_sizes(budget, min(way.most_bytes for way in found))
            return (
                f"not even one sample fits {size} by any way that was tried; the smallest peak at "
                f"batch {self.batch} is {least}."
            )
        most = self.largest[way.name]
        size, peak = format_sizes(budget, most.peak_bytes)
        # A share in `how` is of the peak at the batch that was given, not at the largest batch. By
        # the budget itself, `tune` divides steps of any batch.
        looped = "loop=True and " if way.kind == "loop" else ""
        how = f"tune it with {looped}{_setting(budget)}" if way.division != WHOLE else self.how(way)
        said = (
            f"the largest batch within {size} is {most}: {how}; {peak} and "
            f"{format_ns(most.sample_ns)} per sample, estimated."
        )
        if found[0] is not way:
            at_own = self.largest[found[0].name]
            said += f" As it is, {at_own} fit at {format_ns(at_own.sample_ns)} per sample."
        loops = [one for one in found if one.kind == "loop" and one is not way]
        if loops:
            loop = max(loops, key=self._room)
            most = self.largest[loop.name]
            said += f" By a {loop.name} {most} fit at {format_ns(most.sample_ns)} per sample."
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
        has_budget = bool(self.largest)
        headings = ("largest batch", "per sample") if has_budget else ("times as long", "")
        yield f"{'':31}{'peak':>10}{'step':>10}  {headings[0]:<20}{headings[1]}".rstrip()
        for number, way in enumerate(self.ways):
            mark = "" if way.time_ns else "~"
            cells = self.price(way) if number else "1", ""
            if has_budget:
                most = self.largest.get(way.name)
                cells = ("-", "") if most is None else (str(most), format_ns(most.sample_ns))
            peak, time = format_bytes(way.most_bytes), format_ns(way.step_ns)
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
        largest = values.pop("largest")
        for fields, way in zip(values["ways"], self.ways, strict=True):
            segments, micro_batch, _ = fields.pop("division")
            fields.update(
                how=self.how(way),
                peak_bytes=way.most_bytes,
                time_ns=way.step_ns,
                is_estimated=not way.time_ns,
                is_faster=_is_faster(way),
                segments=segments,
                micro_batch=micro_batch,
                largest=largest.get(way.name),
            )
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


def _is_faster(way: Way) -> bool:
    """True if a way was faster than the step as it is, beyond the noise."""
    return way.rounds >= LEAST_ROUNDS and is_faster(way.ratios, surely=TOLERATED)


def _compact(size: int) -> str:
    """A size as a setting, such as 4MiB."""
    return format_bytes(size).replace(" ", "")


def _setting(budget: int) -> str:
    """The setting of a memory budget, as a size that is not rounded.

    >>> _setting(4 << 20), _setting(1025)
    ("memory_budget='4MiB'", "memory_budget='1025B'")
    """
    text = _compact(budget)
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
