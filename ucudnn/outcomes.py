"""What a plan records of its tuning: origin, ways to run a step and their races, its memory."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from ucudnn.errors import PlanError
from ucudnn.segment import WHOLE, StepDivision
from ucudnn.system.files import write
from ucudnn.timeline import Block, snapshot
from ucudnn.units import Count, Ratio, format_bytes, format_ns, format_ratio, format_sizes
from ucudnn.verdict import HINTED_GAIN, Interval, is_loss

Deviation = Annotated[float, Meta(ge=0, le=sys.float_info.max)]  # no nan, no infinity
MemoryFormat = Annotated[str, Meta(pattern=r"^(keep|channels_last)\Z")]


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
        torch_peak_bytes: peak of a step by torch's own convolutions, with parameters, buffers and
            inputs; 0 if it was not measured.
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
        return is_loss(self.low, self.rounds)

    def __str__(self) -> str:
        if self.reason:
            return f"the plan was not judged by whole steps: {self.reason}{self._about_dropped()}"
        text = (
            f"a step takes {format_ratio(self.ratio, self.low, self.high, self.rounds)} times as "
            f"long as by torch's own: {format_ns(self.plan_ns)} against {format_ns(self.torch_ns)}"
        )
        if self.plan_peak_bytes:
            planned, default = format_sizes(self.plan_peak_bytes, self.torch_peak_bytes)
            text += f", and its peak is {planned} against {default}"
        if self.inside is not None:
            ratio = format_ratio(*self.inside, self.rounds)
            text += f"; inside steps the kernels that the plan changes take {ratio} times as long"
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
class Way:
    """One way to run a step: what it is foreseen to take, and what steps took that were run.

    Args:
        kind: "torch" (the undivided step by torch), "segments" (modules run in micro-batches or are
            recomputed), "loop" (a training loop over micro-batches), "plan" (the step by the plan)
            or "compiled" (the step by torch.compile, divided or not).
        name: name of the way in tables.
        foreseen_bytes: the foreseen peak: the most that is allocated at any moment of the step.
        foreseen_ns: the foreseen time of the step.
        peak_bytes: the peak of a step that was run; 0 if none was.
        time_ns: time of a step that was run, the median if several were; 0 if none was.
        memory_format: "keep", as the model was, or "channels_last".
        ratio: median over the rounds of its time divided by the time of the first way of its race.
        low: lower end of the 95 % interval of the ratio.
        high: upper end of that interval.
        rounds: rounds of that race; 0 if there was none.
        is_allowed: False for torch's own convolutions if they exceed the workspace limit: they are
            timed, but never chosen.
        own_bytes: the foreseen peak without the workspace of convolutions; 0 if it is not known.
        split_bytes: the foreseen peak if convolutions are divided into chunks, which need a part of
            the workspace; 0 if it is not known.
        division: segments and micro-batches of the step; in a plan, the name alone tells them.
    """

    kind: Literal["torch", "segments", "loop", "plan", "compiled"]
    name: str
    foreseen_bytes: Count = 0
    foreseen_ns: Count = 0
    peak_bytes: Count = 0
    time_ns: Count = 0
    memory_format: MemoryFormat = "keep"
    ratio: Ratio = 1.0
    low: Ratio = 1.0
    high: Ratio = 1.0
    rounds: Count = 0
    is_allowed: bool = True
    own_bytes: Count = 0
    split_bytes: Count = 0
    division: StepDivision = WHOLE

    @property
    def most_bytes(self) -> int:
        """The measured peak, or else the foreseen one."""
        return self.peak_bytes or self.foreseen_bytes

    @property
    def step_ns(self) -> int:
        """The measured time, or else the foreseen one."""
        return self.time_ns or self.foreseen_ns

    @property
    def ratios(self) -> Interval:
        """The ratio and its interval."""
        return self.ratio, self.low, self.high


@dataclass(frozen=True, slots=True)
class Compilation:
    """How the steps that judged a plan were compiled, or the reason why they were not compiled.

    >>> print(Compilation(graphs=1, nodes=550))
    the steps that judged it were compiled by torch.compile: 1 graph of 550 operators
    >>> Compilation(reason="no C++ compiler").is_compiled
    False

    Args:
        seconds: seconds that compiling and the first compiled steps took; they are not part of any
            time of a step.
        reason: why steps of a compiled model were not compiled; "" if they were compiled.
        relaid: number of convolutions of a compiled step that do not follow the plan, because in
            the compiled step they have another layout than in the plan.
        graphs: number of graphs that were compiled.
        nodes: number of operators in these graphs; 0 if it is not known.
        breaks: number of breaks between graphs.
        uncompiled: number of operators of a forward that compiled code does not run.
        ways: the compiled ways that were tried, with measured peaks and times.
        left_out: (way, reason) of those that cannot be compiled or compute something else.
        not_tried: ways for which there was no time.
    """

    seconds: Count = 0
    reason: str = ""
    relaid: Count = 0
    graphs: Count = 0
    nodes: Count = 0
    breaks: Count = 0
    uncompiled: Count = 0
    ways: tuple[Way, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    not_tried: tuple[str, ...] = ()

    @property
    def is_compiled(self) -> bool:
        """True if the steps were compiled."""
        return not self.reason

    def __str__(self) -> str:
        took = f", which took {self.seconds} s beside the time budget" if self.seconds else ""
        more = f"; not tried for lack of time: {', '.join(self.not_tried)}" * bool(self.not_tried)
        more += "".join(f"; {name}: {reason}" for name, reason in self.left_out)
        if not self.is_compiled:
            return f"the steps that judged it were not compiled{took}: {self.reason}{more}"
        text = f"the steps that judged it were compiled by torch.compile{took}"
        if self.graphs:
            of = f" of {self.nodes} operators" * bool(self.nodes)
            text += f": {self.graphs} graph{'s' * (self.graphs > 1)}{of}"
            text += f", {self.uncompiled} operators beside them" * bool(self.uncompiled)
        text += more
        if self.relaid:
            text += (
                f"; there {self.relaid} convolutions are in another layout than in the plan, which "
                f"does not act on them: tune with layout='auto', or in the other layout"
            )
        return text


@dataclass(frozen=True, slots=True)
class LayoutRace:
    """A race of steps in the model's own layout and in channels_last, and the layout of the plan.

    >>> torchs = Way("torch", "torch", time_ns=100)
    >>> last = Way("plan", "plan in channels_last", time_ns=80, memory_format="channels_last")
    >>> LayoutRace((torchs, last), winner=1).memory_format
    'channels_last'
    >>> print(LayoutRace(reason="it has no tensors of four or five axes"))
    the model keeps its layout: it has no tensors of four or five axes

    Args:
        ways: the ways that were raced, torch in the model's own layout first; or, if the layout is
            fixed, the plan and then torch in channels_last; empty if nothing was raced.
        winner: index of the way that won.
        reason: why nothing was raced; "" if steps were raced.
        is_fixed: True if the settings keep the layout: the race shows what they give away.

    Raises:
        PlanError: the winner is none of the ways.
    """

    ways: tuple[Way, ...] = ()
    winner: int = 0
    reason: str = ""
    is_fixed: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.winner < max(1, len(self.ways)):
            raise PlanError(f"winner must be the index of a way, got {self.winner}")

    @property
    def memory_format(self) -> str:
        """The layout that won; the model's own if nothing was raced."""
        return self.ways[self.winner].memory_format if self.ways else "keep"

    @property
    def rounds(self) -> int:
        """Number of rounds, in each of which every way ran one step."""
        return self.ways[0].rounds if self.ways else 0

    def __str__(self) -> str:
        if self.reason:
            what = "channels_last was not tried" if self.is_fixed else "the model keeps its layout"
            return f"{what}: {self.reason}"
        first, one = self.ways[0], self.ways[-1 if self.is_fixed else self.winner]
        layout = "the model's own" if self.memory_format == "keep" else self.memory_format
        if one is first:
            least = format_ns(first.time_ns)
            return f"the layout is {layout}: torch's own steps are the fastest, {least}"
        text = (
            f"the layout is {layout}: a step by {one.name} takes "
            f"{format_ratio(*one.ratios, one.rounds)} times as long as by {first.name}, "
            f"{format_ns(one.time_ns)} against {format_ns(first.time_ns)}"
        )
        if self.is_fixed and one.ratio < 1 - HINTED_GAIN:
            text += '; layout="auto" would make a plan for channels_last, too'
        return text


@dataclass(frozen=True, slots=True)
class Comparison:
    """How near a step by a plan is to the undivided step by torch, on the same numbers.

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

    @property
    def is_same(self) -> bool:
        """True if rounding explains the deviation."""
        return self.deviation <= self.tolerance

    def __str__(self) -> str:
        what = f"gradients of {self.parameters} parameters" if self.parameters else "results"
        near = f"{self.deviation:.0e}".replace("e-0", "e-")
        states = f", {self.states} states of random numbers" if self.states > 1 else ""
        return f"{what} equal torch's to {near} ({self.samples} samples{states})"


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
        torch_blocks: the largest blocks that an undivided step by torch allocates, as foreseen.
        plan_blocks: those of a step by the plan.
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
    torch_blocks: tuple[Block, ...] = ()
    plan_blocks: tuple[Block, ...] = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a snapshot of torch's step and the plan's, for https://pytorch.org/memory_viz.

        It shows both steps one after the other, as they were foreseen: which module allocates
        what, and when it is freed. Memory of a CPU is shown, too.

        >>> import tempfile
        >>> StepMemory(100, 20, 0, 40, 10, 90, 130).save(tempfile.mkdtemp() + "/step.pickle")

        Args:
            path: a file, such as step.pickle.

        Raises:
            OutputError: the file cannot be written.
        """
        held = {what: size for what, size in self.causes[1:-1] if size}
        steps = {"torch's step": self.torch_blocks, "the plan's step": self.plan_blocks}
        # The viewer reads no later protocol.
        write(path, pickle.dumps(snapshot(held, steps), protocol=4), "the snapshot")

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
