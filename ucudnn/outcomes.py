"""What a plan records of its tuning: origin, races of steps and of layouts, memory of a step."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from ucudnn.errors import PlanError
from ucudnn.units import Count, Ratio, format_bytes, format_ns, format_sizes

Deviation = Annotated[float, Meta(ge=0, le=sys.float_info.max)]  # no nan, no infinity
MemoryFormat = Annotated[str, Meta(pattern=r"^(keep|channels_last)\Z")]
# A loss by a plan, and a gain by another layout or another way to run steps, count only if they are
# more than this fraction of a step's time.
TOLERATED = 0.01
# A step race with fewer rounds than this does not show how noisy its times are. Then only a loss of
# more than the fraction `_CLEAR_LOSS` counts as a loss.
LEAST_ROUNDS = 3
_CLEAR_LOSS = 0.1
# A `LayoutHint` has few rounds, so channels_last is recommended only if it saves more than this
# fraction of a step's time.
_HINTED = 0.05


@dataclass(frozen=True, slots=True)
class Origin:
    """How a plan came about, for people who find its file; it has no effect on what runs.

    >>> print(Origin("net.py:net", made="2026-01-31", ucudnn="1.2", effort="quick", load="0.5"))
    net.py:net, made 2026-01-31, ucudnn 1.2, protocol 0, effort quick, tuned in 0 s, load 0.5

    Args:
        model: class of the model, or its name on the command line; "" if there was no model.
        inputs: shapes and dtypes, such as "8x3x224x224 float32".
        made: date and time in UTC, as 2026-01-31T12:00:00Z.
        ucudnn: version of this package.
        protocol: version number of the timing loop.
        effort: the setting `effort`.
        budget: the most seconds that tuning was allowed to take; "" if there was no limit.
        seconds: seconds that tuning took, rounded.
        load: average number of processes that ran or waited to run in the last minute of tuning.
        left_out: kernels that have no plan, or none for some smaller batches, because the time
            budget was used up or there was too little memory.
        over_limit: kernels without a plan, because no split fits the workspace limit.
    """

    model: str = ""
    inputs: tuple[str, ...] = ()
    made: str = ""
    ucudnn: str = ""
    protocol: Count = 0
    effort: str = ""
    budget: str = ""
    seconds: Count = 0
    load: str = ""
    left_out: tuple[str, ...] = ()
    over_limit: tuple[str, ...] = ()

    def __str__(self) -> str:
        about = [self.model, *(f"on {text}" for text in self.inputs), f"made {self.made}"]
        with_what = f"ucudnn {self.ucudnn}, protocol {self.protocol}, effort {self.effort}"
        took = f"tuned in {self.seconds} s" + (f" of {self.budget} s" if self.budget else "")
        return ", ".join(filter(None, [*about, with_what, took, f"load {self.load}"]))


@dataclass(frozen=True, slots=True)
class StepRace:
    """The outcome of a race of whole training steps, or the reason why there was none.

    >>> print(StepRace(110, 100, 0.91, 0.9, 0.92, 5))
    a step takes 0.91 (0.90 to 0.92) times as long as by torch's own: 100 ns against 110 ns

    Args:
        torch_ns: median time of a step by torch's own convolutions.
        plan_ns: median time of a step by the plan.
        ratio: median over the rounds of the plan's time divided by torch's time.
        low: lower end of the 95 % interval of the ratio.
        high: upper end of that interval.
        rounds: pairs of steps that were timed.
        torch_peak_bytes: peak of a step by torch's own convolutions, above what was allocated
            before it; 0 if it was not measured.
        plan_peak_bytes: peak of a step by the plan, as above.
        dropped: kernels given back to torch, because steps were not faster with their plans.
        reason: why no steps by the plan were raced; "" if they were.
        inside: (ratio, low, high) as above, but for the sum of the times, inside the steps, of the
            kernels that the plan changes; None if kernels were not timed inside steps.
    """

    torch_ns: Count = 0
    plan_ns: Count = 0
    ratio: Ratio = 1.0
    low: Ratio = 1.0
    high: Ratio = 1.0
    rounds: Count = 0
    torch_peak_bytes: Count = 0
    plan_peak_bytes: Count = 0
    dropped: tuple[str, ...] = ()
    reason: str = ""
    inside: tuple[Ratio, Ratio, Ratio] | None = None

    @property
    def is_loss(self) -> bool:
        """True if steps are slower by the plan, beyond the noise."""
        # The whole interval must be above 1 + `least`: noise is no reason to give a plan up.
        least = TOLERATED if self.rounds >= LEAST_ROUNDS else _CLEAR_LOSS
        return self.rounds > 0 and self.low > 1 + least

    def __str__(self) -> str:
        if self.reason:
            return f"the plan was not judged by whole steps: {self.reason}{self._about_dropped()}"
        text = (
            f"a step takes {self.ratio:.2f} ({self.low:.2f} to {self.high:.2f}) times as long as "
            f"by torch's own: {format_ns(self.plan_ns)} against {format_ns(self.torch_ns)}"
        )
        if self.plan_peak_bytes:
            planned, default = format_sizes(self.plan_peak_bytes, self.torch_peak_bytes)
            text += (
                f", and its peak is {planned} above what was allocated before it, against {default}"
            )
        if self.inside is not None:
            ratio, low, high = self.inside
            text += (
                f"; inside steps the kernels that the plan changes take {ratio:.2f} "
                f"({low:.2f} to {high:.2f}) times as long"
            )
        return text + self._about_dropped()

    def _about_dropped(self) -> str:
        if not self.dropped:
            return ""
        several = len(self.dropped) > 1
        return (
            f"; {len(self.dropped)} kernel{'s' * several} did not pay there and "
            f"{'are' if several else 'is'} torch's own"
        )


@dataclass(frozen=True, slots=True)
class Compilation:
    """How the steps that judged a plan were compiled, or the reason why they were not compiled.

    >>> print(Compilation(seconds=34))
    the steps that judged it were compiled by torch.compile, which took 34 s beside the time budget
    >>> Compilation(reason="no C++ compiler").is_compiled
    False

    Args:
        seconds: seconds that compiling and the first compiled steps took; they are not part of any
            time of a step.
        reason: why steps of a compiled model were not compiled; "" if they were compiled.
        relaid: number of convolutions of a compiled step that do not follow the plan, because in
            the compiled step they have another layout than in the plan.
    """

    seconds: Count = 0
    reason: str = ""
    relaid: Count = 0

    @property
    def is_compiled(self) -> bool:
        """True if the steps were compiled."""
        return not self.reason

    def __str__(self) -> str:
        if not self.is_compiled:
            return (
                f"the model is compiled, but the steps that judged its plan were not: {self.reason}"
            )
        text = (
            f"the steps that judged it were compiled by torch.compile, which took {self.seconds} s "
            f"beside the time budget"
        )
        if self.relaid:
            text += (
                f"; there {self.relaid} convolutions are in another layout than in the plan, which "
                f"does not act on them: tune with layout='auto', or in the other layout"
            )
        return text


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to compute the steps of a model: by torch or by a plan, in one layout.

    >>> Contestant("channels_last", True, 90).name
    'plan in channels_last'

    Args:
        memory_format: "keep", as the model was, or "channels_last".
        is_plan: True: by the plan made for that layout; False: by torch's own convolutions.
        time_ns: median time of a step.
        ratio: median over the rounds of its time divided by the time of the first contestant.
        low: lower end of the 95 % interval of the ratio.
        high: upper end of that interval.
        peak_bytes: peak of allocated memory in a step.
        is_allowed: False for torch's own convolutions if they exceed the workspace limit: they are
            timed, but never chosen.
    """

    memory_format: MemoryFormat
    is_plan: bool
    time_ns: Count
    ratio: Ratio = 1.0
    low: Ratio = 1.0
    high: Ratio = 1.0
    peak_bytes: Count = 0
    is_allowed: bool = True

    @property
    def name(self) -> str:
        """The name of this contestant in tables."""
        who = "plan" if self.is_plan else "torch"
        return who if self.memory_format == "keep" else f"{who} in channels_last"


@dataclass(frozen=True, slots=True)
class LayoutRace:
    """How the layout of a model was decided.

    >>> torchs, plans = Contestant("keep", False, 100), Contestant("channels_last", True, 80, 0.8)
    >>> LayoutRace((torchs, plans), winner=1, rounds=5).memory_format
    'channels_last'
    >>> print(LayoutRace(reason="it has no tensors of four or five axes"))
    the model keeps its layout: it has no tensors of four or five axes

    Args:
        contestants: the contestants; torch in the model's own layout comes first; empty if nothing
            was compared.
        winner: index of the contestant that won.
        rounds: number of rounds, in each of which every contestant ran one step.
        reason: why the model keeps its layout without a race; "" if steps were raced.

    Raises:
        PlanError: the winner is no contestant.
    """

    contestants: tuple[Contestant, ...] = ()
    winner: int = 0
    rounds: Count = 0
    reason: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.winner < max(1, len(self.contestants)):
            raise PlanError(f"winner must be the index of a contestant, got {self.winner}")

    @property
    def memory_format(self) -> str:
        """The layout that won; the model's own if nothing was compared."""
        return self.contestants[self.winner].memory_format if self.contestants else "keep"

    def __str__(self) -> str:
        if not self.contestants:
            return f"the model keeps its layout: {self.reason}"
        winner = self.contestants[self.winner]
        chosen = "the model's own" if winner.memory_format == "keep" else winner.memory_format
        # The ratios compare each contestant with the first one, which is torch in the model's own
        # layout.
        first = self.contestants[0]
        if winner is first:
            least = format_ns(first.time_ns)
            return f"the layout is {chosen}: torch's own steps are the fastest, {least}"
        return (
            f"the layout is {chosen}: a step by {winner.name} takes {winner.ratio:.2f} "
            f"({winner.low:.2f} to {winner.high:.2f}) times as long as by {first.name}, "
            f"{format_ns(winner.time_ns)} against {format_ns(first.time_ns)}"
        )


@dataclass(frozen=True, slots=True)
class LayoutHint:
    """A comparison of steps by torch in channels_last with steps by a plan in the model's layout.

    >>> LayoutHint(channels_last_ns=80, plan_ns=100, rounds=2).ratio
    0.8
    >>> print(LayoutHint(reason="it fails there"))
    channels_last was not tried: it fails there

    Args:
        channels_last_ns: median time of a step by torch's own convolutions in channels_last.
        plan_ns: median time of a step by the plan, in the model's own layout.
        rounds: number of rounds, each with one step by torch and one step by the plan.
        reason: why steps in channels_last were not timed; "" if they were timed.
    """

    channels_last_ns: Count = 0
    plan_ns: Count = 0
    rounds: Count = 0
    reason: str = ""

    @property
    def ratio(self) -> float:
        """Time of a step in channels_last over the time of a step by the plan; 1 if not timed."""
        return self.channels_last_ns / self.plan_ns if self.plan_ns else 1.0

    def __str__(self) -> str:
        if self.reason:
            return f"channels_last was not tried: {self.reason}"
        text = (
            f"a step by torch in channels_last takes {self.ratio:.2f} times as long as by this "
            f"plan ({format_ns(self.channels_last_ns)} against {format_ns(self.plan_ns)}, median "
            f"of {self.rounds} round{'s' * (self.rounds > 1)})"
        )
        if self.ratio < 1 - _HINTED:
            text += ': layout="auto" would make a plan for channels_last, too'
        return text


@dataclass(frozen=True, slots=True)
class Comparison:
    """How near a divided step by a plan is to the undivided step by torch, on the same numbers.

    >>> print(Comparison(3e-7, 3e-4, parameters=62, samples=16, states=1))
    gradients of 62 parameters equal torch's to 3e-7 (16 samples)

    Args:
        deviation: the largest relative difference, by norm, of any result, gradient of a parameter
            or of an input, buffer, or anything else that the step left.
        tolerance: the most that rounding explains.
        parameters: number of parameters whose gradients were compared; 0: an inference.
        samples: number of samples of the step.
        states: number of states of the random generators with which steps were compared.
    """

    deviation: Deviation
    tolerance: Deviation
    parameters: Count = 0
    samples: Count = 0
    states: Count = 1

    def __str__(self) -> str:
        what = f"gradients of {self.parameters} parameters" if self.parameters else "results"
        near = f"{self.deviation:.0e}".replace("e-0", "e-")
        states = f", {self.states} states of random numbers" if self.states > 1 else ""
        return f"{what} equal torch's to {near} ({self.samples} samples{states})"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a step, with the peak of its memory and its time.

    Args:
        kind: "torch" (the undivided step by torch), "segments" (modules run in micro-batches or are
            recomputed), "loop" (a training loop over micro-batches) or "plan" (the step by the
            plan).
        name: name of the way in tables.
        foreseen_bytes: the foreseen peak: the most that is allocated at any moment of the step.
        foreseen_ns: the foreseen time of the step.
        peak_bytes: the peak of a step that was run; 0 if none was.
        time_ns: time of a step that was run; 0 if none was.
    """

    kind: Literal["torch", "segments", "loop", "plan"]
    name: str
    foreseen_bytes: Count
    foreseen_ns: Count
    peak_bytes: Count = 0
    time_ns: Count = 0

    @property
    def most_bytes(self) -> int:
        """The measured peak, or else the foreseen one."""
        return self.peak_bytes or self.foreseen_bytes


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory of a whole step: the budget, what is allocated during the whole step, and peaks.

    >>> memory = StepMemory(100, 20, 0, 40, 10, 90, 130, 98, is_training=True)
    >>> memory.causes[0], memory.causes[-1]
    (('activations and new gradients', 20), ('workspace', 40))

    Args:
        budget_bytes: the memory budget: bytes that the step may have allocated at any moment.
        parameters_bytes: parameters of the model.
        gradients_bytes: gradients that existed when tuning began.
        optimizer_bytes: state that the optimisers had when tuning began.
        other_bytes: buffers and inputs; on a GPU also all else that the process had allocated.
        own_peak_bytes: peak of an undivided step by torch, without workspace of convolutions.
        torch_peak_bytes: foreseen peak of an undivided step by torch, with workspace.
        plan_peak_bytes: measured peak of a step by the plan; 0 if it was not measured yet.
        is_training: True: the step is forward and backward; False: forward without a graph.
        calls: for each planned convolution of a step by the plan, in order: (index of its kernel in
            the plan, bytes that are live beside its workspace).
        ways: the ways to run the step that were foreseen.
        torch_foreseen_ns: foreseen time of an undivided step by torch.
        plan_foreseen_bytes: foreseen peak of a step by the plan.
        plan_foreseen_ns: foreseen time of a step by the plan.
        plan_ns: measured time of a step by the plan; 0 if it was not measured yet.
    """

    budget_bytes: Count
    parameters_bytes: Count
    gradients_bytes: Count
    optimizer_bytes: Count
    other_bytes: Count
    own_peak_bytes: Count
    torch_peak_bytes: Count
    plan_peak_bytes: Count = 0
    is_training: bool = True
    calls: tuple[tuple[Count, Count], ...] = ()
    ways: tuple[Way, ...] = ()
    torch_foreseen_ns: Count = 0
    plan_foreseen_bytes: Count = 0
    plan_foreseen_ns: Count = 0
    plan_ns: Count = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that are allocated all through a step."""
        named = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        return named + self.other_bytes

    @property
    def causes(self) -> tuple[tuple[str, int], ...]:
        """The parts of the peak of an undivided step by torch, as (purpose, bytes)."""
        return (
            (
                "activations and new gradients" if self.is_training else "activations",
                max(0, self.own_peak_bytes - self.held_bytes),
            ),
            ("parameters", self.parameters_bytes),
            ("gradients", self.gradients_bytes),
            ("optimiser state", self.optimizer_bytes),
            ("buffers, inputs and others", self.other_bytes),
            ("workspace", max(0, self.torch_peak_bytes - self.own_peak_bytes)),
        )

    def __str__(self) -> str:
        parts = [f"{format_bytes(size)} of {purpose}" for purpose, size in self.causes if size]
        kind = "a training step" if self.is_training else "an inference"
        torchs, planned, budget = format_sizes(
            self.torch_peak_bytes, self.plan_peak_bytes, self.budget_bytes
        )
        text = f"{kind} by torch has at most {torchs} allocated ({', '.join(parts) or 'nothing'})"
        if self.plan_peak_bytes:
            text += f", by the plan {planned}"
        return f"{text}; the budget is {budget}"


@dataclass(frozen=True, slots=True)
class Foresight:
    """What a step takes, foreseen without running it.

    >>> print(Foresight(3 << 20, 40_000_000, 8, True, (), (("backward", 1 << 20),)))
    a training step of 8 samples has at most 3 MiB allocated and takes about 40.0 ms (foreseen)

    Args:
        peak_bytes: the most that is allocated at any moment of the step: parameters, buffers and
            inputs included.
        time_ns: time of the step.
        batch: samples of the step.
        is_training: True: forward and backward; False: forward without a graph.
        held: (purpose, bytes) of what is allocated all through the step.
        fills: (module, bytes) of what modules have allocated at the peak, the largest first; what
            is allocated in backward, such as gradients, has the name "backward".
        notes: what could not be foreseen exactly, and why.
    """

    peak_bytes: int
    time_ns: int
    batch: int
    is_training: bool
    held: tuple[tuple[str, int], ...]
    fills: tuple[tuple[str, int], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        kind = "a training step" if self.is_training else "an inference"
        return (
            f"{kind} of {self.batch} samples has at most {format_bytes(self.peak_bytes)} allocated "
            f"and takes about {format_ns(self.time_ns)} (foreseen)"
        )
