"""Compare a step by torch with one by a finished plan, a compiled one, or one in another layout.

Both steps run on copies of the model, with the same random numbers. By a plan and compiled,
compared are results, gradients of parameters and inputs, buffers, and what the step leaves in
attributes, variables and hooks; in another layout, results and gradients of parameters.
"""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import hypot, inf, isnan
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ucudnn.benchmark.failures import is_out_of_memory
from ucudnn.errors import UcudnnWarning, first_line
from ucudnn.execution.compiling import is_compiled, uncompiled
from ucudnn.execution.micro_batching import batch_of, hooks_of
from ucudnn.execution.nesting import take_apart
from ucudnn.execution.override import Installation
from ucudnn.execution.remembering import Remembered, left_by
from ucudnn.execution.runner import Runner
from ucudnn.outcomes import Comparison
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.segment import Segment, StepDivision
from ucudnn.steps.run import (
    STEP_ERRORS,
    Steps,
    cloned,
    cropped,
    drop_gradients,
    gradient_mode,
    nudge_,
    parts_of,
    run_with_leaves,
    tensors_of,
    undisturbed,
)
from ucudnn.steps.same_numbers import SameForSamples
from ucudnn.system.processes import cached_property

# Relative rounding of a factor in TF32, a format for which torch has no dtype.
_EPS_OF_TF32 = 2.0**-10
# Relative differences up to this power of the coarsest relative rounding (eps) need no further
# test. The gradients of two layouts, all together, may differ more, by 0.002 in a ResNet-18; and so
# may a single gradient by compiled code, by 0.005 where one input of a ReLU has crossed zero.
_POWER, _POWER_OF_GRADIENTS = 0.5, 0.25
# Rounding moves inputs of a ReLU across zero, or changes the maximum of a pool. So differences are
# tolerated up to this many times the difference that a change of all weights by one rounding makes;
# by a plan never above the second number. In another layout, 1 to 3 times as much was observed.
_MOST_TIMES, _MOST = 10.0, 0.2
# The least samples of a step that has parts.
_LEAST = 2


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a step by a plan is from the step by torch.

    Args:
        largest: the largest relative difference of anything that was compared.
        where: what differs by this much.
        parameters: number of parameters whose gradients were compared.
        draws: True if the step draws random numbers.
    """

    largest: float
    where: str
    parameters: int
    draws: bool

    def __str__(self) -> str:
        how_far = "all of it" if self.largest == inf else f"{100 * self.largest:.2g} %"
        return f"{self.where} differs from torch's by {how_far}"


@dataclass
class _Outcome:
    """What a step computed, and what it left."""

    results: list[list[Any]] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    inputs: list[list[Tensor | None]] = field(default_factory=list)
    buffers: dict[str, list[Any]] = field(default_factory=dict)
    left: dict[str, list[Any]] = field(default_factory=dict)
    draws: bool = False


class PlanComparer:
    """Compares steps of one model by torch with steps by a plan: divided, or in another layout.

    Args:
        model: any module.
        inputs: an example input.
        plan: the plan, whose convolutions are computed as it says.
        is_training: True: a step is forward and backward; False: forward without a graph.
        is_unaligned: True if the plan divides a module that draws random numbers which cannot be
            made the same for each sample.
        share: at most so much of the batch is run, because memory suffices for no more: a part of
            the samples or, of one or two samples, of their spatial axes.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        plan: Plan,
        *,
        is_training: bool,
        is_unaligned: bool = False,
        share: float = 1.0,
    ) -> None:
        self._model, self._plan, self._whole = model, plan, inputs
        self._inputs, count = inputs, batch_of(inputs)
        self._is_training, self._is_unaligned = is_training, is_unaligned
        # A step may have shapes that the plan does not cover: torch computes them.
        self._runner = Runner(plan, replace(plan.config, unplanned="torch"))
        dtypes = {one.dtype for one in model.parameters() if one.is_floating_point()}
        planned = coarsest_eps(kernel.problem for kernel in plan.kernels)
        self._eps = max(planned, *(torch.finfo(one).eps for one in dtypes))
        if share < 1 and count > _LEAST:
            self._inputs = self._part(max(_LEAST, int(count * share)))
        while count <= _LEAST and _share(self._inputs, inputs) > share:
            half = tree_map_only(Tensor, cropped, self._inputs)
            if _share(half, self._inputs) == 1:
                break
            self._inputs = half
        if count <= _LEAST and not self._accepts(self._inputs):
            self._inputs = inputs  # it is a model for inputs of one size

    def compare(self) -> tuple[Comparison, str]:
        """How near steps are, and what differs by more than rounding explains; "" if nothing does.

        Steps of the whole batch are compared, or of the largest part of it for which memory
        suffices. If they draw random numbers, steps of a part with other numbers are compared, too.
        """
        count, inputs = batch_of(self._inputs), self._inputs
        difference = None
        while difference is None:
            try:
                difference, most = self._difference(inputs, self._plan.division, 0)
            except STEP_ERRORS as error:
                if not is_out_of_memory(error):
                    return Comparison(inf, 0.0), f"a step by the plan fails ({first_line(error)})"
                smaller = self._smaller(inputs)
                if smaller is None:
                    raise
                inputs = smaller
        found = [(difference, most)]
        if difference.draws and difference.largest <= most:
            found.append(self._difference(self._part(count // 4 + 1), self._plan.division, 1))
        worst, most = max(found, key=lambda one: one[0].largest / max(one[1], 1e-300))
        is_same = all(one.largest <= limit for one, limit in found)
        compared = Comparison(
            deviation=min(worst.largest, 1e9),
            tolerance=most,
            parameters=difference.parameters,
            samples=batch_of(inputs),
            states=len(found),
        )
        return compared, "" if is_same else str(worst)

    def causes(self, reason: str) -> dict[Segment, str]:
        """The segments by which, each alone, a step is not torch's, and how it differs.

        If there is none, these are the segments without each of which a step is torch's; or else
        all segments.

        Args:
            reason: how steps with all segments differ.
        """
        segments = self._plan.segments
        found = {one: self._reason(StepDivision((one,))) for one in segments}
        found = {one: why for one, why in found.items() if why}
        for one in () if found else segments:
            others = tuple(each for each in segments if each is not one)
            if not self._reason(self._plan.division._replace(segments=others)):
                found[one] = f"beside other segments, {reason}"
        return found or dict.fromkeys(segments, reason)

    def _reason(self, division: StepDivision) -> str:
        try:
            for state in (0, 1):
                difference, most = self._difference(self._inputs, division, state)
                if difference.largest > most:
                    return str(difference)
                if not difference.draws:
                    break
        except STEP_ERRORS as error:
            return f"a step with it fails ({first_line(error)})"
        return ""

    def _part(self, size: int) -> Any:
        """The first samples of the inputs: an odd number, so that the last part is uneven."""
        size = max(_LEAST, size) | 1
        return next(parts_of(self._inputs, min(batch_of(self._inputs), size)))

    def _smaller(self, inputs: Any) -> Any:
        """Half of the samples, or of the spatial axes of a single one; None if there is no half."""
        size = batch_of(inputs)
        if size > _LEAST:
            return self._part(size // 2)
        half = tree_map_only(Tensor, cropped, inputs)
        return half if _share(half, inputs) < 1 and self._accepts(half) else None

    def _accepts(self, inputs: Any) -> bool:
        """False if the model fails on a part of the spatial axes."""
        if _share(inputs, self._whole) == 1:
            return True
        try:
            self._step(inputs, None, 0)
        except STEP_ERRORS as error:
            return is_out_of_memory(error)
        return True

    def _difference(
        self, inputs: Any, division: StepDivision, state: int
    ) -> tuple[Difference, float]:
        """The difference of two steps, and the most that rounding explains."""
        division = _within(division, batch_of(inputs), _share(inputs, self._whole))
        truth = self._step(inputs, None, state)
        found = self._step(inputs, division, state)
        difference = _between(truth, found)
        if difference.largest > self._eps**_POWER and self._is_unaligned and truth.draws:
            # Only the same micro-batches, with everything kept, draw the same random numbers.
            truth, found = (
                self._step(inputs, one, state, same=False) for one in (_kept(division), division)
            )
            difference = _between(truth, found)
        usual = self._eps**_POWER
        if difference.largest <= usual:
            return difference, usual
        del found
        nudged = _between(truth, self._step(inputs, None, state, nudge=self._eps))
        return difference, max(usual, min(_MOST, _MOST_TIMES * nudged.largest))

    def _step(
        self,
        inputs: Any,
        division: StepDivision | None,
        state: int,
        *,
        nudge: float = 0.0,
        same: bool = True,
    ) -> _Outcome:
        """A step by the plan, divided so; None: by torch."""
        if division is None:
            return _outcome(Steps(self._model, inputs, self._is_training), state, nudge, same)
        how = self._is_training, self._plan.memory_format, division
        with Installation(self._plan.device.type, self._runner):
            return _outcome(Steps(self._model, inputs, *how), state, nudge, same)


class CompiledComparer:
    """Compares compiled steps of one model with its step by torch.

    If its user has compiled the model, its own compiled step stands for torch's.

    Args:
        model: any module.
        inputs: an example input, or a list of these.
        is_training: True: a step is forward and backward; False: forward without a graph.
        problems: the convolutions of the model.
        share: at most so much of the batch is run, because memory suffices for no more.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        *,
        is_training: bool,
        problems: Iterable[Problem],
        share: float = 1.0,
    ) -> None:
        self._how = model, inputs, is_training
        count = batch_of(inputs[0] if isinstance(inputs, list) else inputs)
        self._samples = count if share >= 1 else max(min(_LEAST, count), int(share * count))
        self._is_compiled = is_compiled(model)
        dtypes = {one.dtype for one in model.parameters() if one.is_floating_point()}
        self._eps = max([coarsest_eps(problems), *(torch.finfo(one).eps for one in dtypes)])
        # What torch's step computes of each example, by layout and nudge.
        self._truths: dict[tuple[str, float], list[_Outcome]] = {}

    def _truth(self, memory_format: str = "keep", nudge: float = 0.0) -> list[_Outcome]:
        key = memory_format, nudge
        if key not in self._truths:
            steps = Steps(*self._how, memory_format)
            if self._is_compiled:
                steps.compile()
            self._truths[key] = _outcomes(steps, self._samples, nudge)
        return self._truths[key]

    def compare(self, steps: Steps) -> tuple[Comparison, str]:
        """How near compiled steps are, and what differs by more than rounding; "" if nothing does.

        Code that Inductor compiles draws other random numbers than torch, and so do steps in
        another layout. If a step draws any, it is compared with torch's in the same layout, by code
        that is compiled to draw torch's numbers.
        """
        layout, truths = "keep", self._truth()
        if any(one.draws for one in truths):
            layout = steps.memory_format
            if layout != "keep" and (reason := self._reason_against_layout):
                return Comparison(0.0, 0.0), reason
            truths, found = self._truth(layout), self._drawing(steps)
        else:
            found = _outcomes(steps, self._samples)
        compared, reason = Comparison(0.0, 0.0), ""
        for of, power in ((_others, _POWER), (_gradients, _POWER_OF_GRADIENTS)):
            worst, most = _worst(of, truths, found), self._eps**power
            if worst.largest > most:
                nudged = _worst(of, truths, self._truth(layout, self._eps))
                most = max(most, min(_MOST, _MOST_TIMES * nudged.largest))
            if worst.largest >= compared.deviation:
                largest = min(worst.largest, 1e9)
                compared = Comparison(largest, most, worst.parameters, self._samples)
            reason = str(worst) if worst.largest > most else reason
        return compared, reason

    @cached_property
    def _reason_against_layout(self) -> str:
        model, inputs, is_training = self._how
        return reason_against_layout(model, inputs, self._eps, is_training)

    def _drawing(self, steps: Steps) -> list[_Outcome]:
        """What compiled steps compute if they draw the random numbers of the model's own step."""
        if self._is_compiled:
            return _outcomes(steps, self._samples)
        from torch._inductor import config

        # Whatever is compiled in this context, for these samples, too, draws torch's numbers.
        with config.patch(fallback_random=True):
            again = Steps(*self._how, steps.memory_format, steps.division)
            again.compile()
            return _outcomes(again, self._samples)


def _worst(
    of: Callable[[_Outcome, _Outcome], _Compared],
    truths: Sequence[_Outcome],
    found: Sequence[_Outcome],
) -> Difference:
    """The largest difference of all examples, of some of what is compared."""
    pairs = zip(truths, found, strict=True)
    return max((_largest(one, of(one, other)) for one, other in pairs), key=lambda d: d.largest)


def _outcomes(steps: Steps, samples: int, nudge: float = 0.0) -> list[_Outcome]:
    """What a step of each example computes from the state that the user's model is in."""
    found = []
    for inputs in steps.inputs:
        steps.restore()
        part = next(parts_of(inputs, samples)) if samples < batch_of(inputs) else inputs
        found.append(_outcome(steps, nudge=nudge, same=False, inputs=part))
        drop_gradients(steps.model)
    return found


def _outcome(
    steps: Steps, state: int = 0, nudge: float = 0.0, same: bool = True, inputs: Any = None
) -> _Outcome:
    """Run a step of an example on a copy of the model.

    Args:
        steps: the copy, which is new or restored.
        state: number of the random numbers.
        nudge: fraction by which each parameter is changed first.
        same: False: samples may draw different random numbers.
        inputs: the example; None: the first one.
    """
    model, is_training = steps.model, steps.backward
    own = steps.inputs[0] if inputs is None else inputs
    if nudge:
        nudge_(model, nudge)
    outcome, numbers = _Outcome(), SameForSamples(state)
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        stack.enter_context(warnings.catch_warnings())
        # The user did not run these steps.
        warnings.simplefilter("ignore", UcudnnWarning)
        stack.enter_context(gradient_mode(is_training))
        received = dict[str, list[Any]]()
        stack.enter_context(Remembered(model, "the model", updates=False))
        if not steps.is_compiled:  # with other hooks, other code would be compiled
            stack.enter_context(uncompiled(is_compiled(model)))
            received = stack.enter_context(_received(model))
        torch.manual_seed(state), random.seed(state), np.random.seed(state)
        before = _numbers(not same)
        with numbers if same else nullcontext():
            for part in parts_of(own, steps.division.micro_batch):
                outputs, leaves = run_with_leaves(steps.run, part, is_training, is_smooth=True)
                outcome.results.append([cloned(one) for one in take_apart(outputs)[0]])
                outcome.inputs.append([one.grad for one in leaves])
                del outputs
        outcome.draws = bool(numbers.drawn) or _numbers(not same) != before
        outcome.gradients = {name: one.grad for name, one in model.named_parameters()}
        outcome.buffers = {name: [cloned(one)] for name, one in model.named_buffers()}
        for name, module in model.named_modules():
            outcome.left |= left_by(module, name)
        outcome.left |= {f"what hooks of {k!r} received": v for k, v in received.items()}
    return outcome


def reason_against_layout(model: nn.Module, inputs: Any, eps: float, is_training: bool) -> str:
    """Reason why a model cannot be in channels_last; "" if its results are the same there.

    Outputs and gradients of a step in both layouts are compared. If they differ by more than
    rounding usually causes, one more step is run with all weights changed by one rounding. It shows
    how strongly rounding changes the results of this model. An error for lack of memory is raised
    again. `eps` is the coarsest relative rounding.
    """
    examples = inputs if isinstance(inputs, list) else [inputs]

    def run(layout: str, nudge: float = 0.0) -> tuple[list[Tensor], list[Tensor]]:
        found = [_outcome(Steps(model, one, is_training, layout), nudge=nudge) for one in examples]
        gradients = [[*one.gradients.values()] for one in found]
        return tensors_of([one.results for one in found]), tensors_of(gradients)

    def differences(layout: str, nudge: float = 0.0) -> tuple[float, float]:
        return _of_layouts(truth, run(layout, nudge))

    truth = run("keep")
    try:
        outputs, gradients = differences("channels_last")
    except STEP_ERRORS as error:
        if is_out_of_memory(error):
            raise
        return f"it fails in channels_last ({first_line(error)})"
    found = ("outputs", outputs, eps**_POWER), ("gradients", gradients, eps**_POWER_OF_GRADIENTS)
    if any(difference > usual for _, difference, usual in found):
        nudged = differences("keep", nudge=eps)
        for (name, difference, usual), rounding in zip(found, nudged, strict=True):
            if difference > max(usual, _MOST_TIMES * rounding):
                return (
                    f"in channels_last its {name} differ by {difference:.2g} of their norm, and by "
                    f"{rounding:.2g} where weights change by one rounding"
                )
    return ""


def coarsest_eps(problems: Iterable[Problem]) -> float:
    """The coarsest relative rounding of convolutions."""
    problems = [*problems]
    found = [torch.finfo(getattr(torch, problem.dtype)).eps for problem in problems]
    # A plan may have no kernel, if there was no time for any.
    return max([0.0, *found, *(_EPS_OF_TF32 for problem in problems if problem.math == "tf32")])


def _share(inputs: Any, whole: Any) -> float:
    """How much of some inputs others are, by their elements."""
    part, all_ = (sum(one.numel() for one in tensors_of(each)) for each in (inputs, whole))
    return part / max(1, all_)


def _within(division: StepDivision, count: int, share: float) -> StepDivision:
    """The division of smaller inputs, in which as many segments as possible have parts."""
    most = max(1, (count + 1) // 2)

    def smaller(one: Segment) -> Segment:
        size = one.micro_batch
        if one.rows is not None:
            one = replace(one, rows=max(1, int(one.rows * share)))
        return (
            one if size is None or size < count else replace(one, micro_batch=max(one.least, most))
        )

    size = division.micro_batch
    size = size if size is None or size < count else most
    return StepDivision(tuple(map(smaller, division.segments)), size)


def _kept(division: StepDivision) -> StepDivision:
    """The same micro-batches, all of which keep what backward needs."""
    divided = (one for one in division.segments if one.is_cut)
    plain = (replace(one, recompute=False, kept=0, selective=False) for one in divided)
    return StepDivision(tuple(plain), division.micro_batch)


@contextmanager
def _received(model: nn.Module) -> Iterator[dict[str, list[Any]]]:
    """Context that notes the results of those modules that have hooks, as the last hook."""
    received: dict[str, list[Any]] = {}

    def note(name: str, module: nn.Module, args: Any, result: Any) -> None:
        del module, args
        received.setdefault(name, []).extend(cloned(one) for one in tensors_of(result))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if any(hooks_of(module)):
                stack.callback(module.register_forward_hook(partial(note, name)).remove)
        yield received


def _numbers(of_torch: bool) -> bytes:
    """The states of Python's and NumPy's generators, and of torch's."""
    states: list[Any] = [random.getstate(), np.random.get_state()]
    if of_torch:
        states.append(torch.get_rng_state().tolist())
        if torch.cuda.is_initialized():
            states += [one.tolist() for one in torch.cuda.get_rng_state_all()]
    return pickle.dumps(states)


# What is compared, by name, each with what measures the relative difference.
_Compared = list[tuple[str, Callable[[], float]]]


def _between(truth: _Outcome, found: _Outcome) -> Difference:
    """The largest difference of two steps."""
    return _largest(truth, [*_others(truth, found), *_gradients(truth, found)])


def _largest(truth: _Outcome, compared: _Compared) -> Difference:
    worst, where = 0.0, ""
    for name, measure in compared:
        difference = measure()
        if not difference <= worst:  # NaN is the worst
            worst, where = inf if isnan(difference) else difference, name
    count = sum(one is not None for one in truth.gradients.values())
    return Difference(worst, where, count, truth.draws)


def _gradients(truth: _Outcome, found: _Outcome) -> _Compared:
    """The gradients of parameters."""
    scale = max((_size(one) for one in truth.gradients.values() if one is not None), default=0.0)
    return [
        (f"the gradient of {name!r}", partial(_relative, one, found.gradients.get(name), scale))
        for name, one in truth.gradients.items()
    ]


def _others(truth: _Outcome, found: _Outcome) -> _Compared:
    """Results, gradients of inputs, buffers, and what steps left."""
    compared: _Compared = [
        ("its result", partial(_of_lists, _joined(truth.results), _joined(found.results))),
        (
            "the gradient of its inputs",
            partial(_of_lists, _joined(truth.inputs), _joined(found.inputs)),
        ),
    ]
    largest: dict[str, float] = {}  # of the buffers of each module
    for name, [one] in truth.buffers.items():
        if one.is_floating_point():
            owner = name.rpartition(".")[0]
            largest[owner] = max(largest.get(owner, 0.0), _size(one))
    for name, values in truth.buffers.items():
        others, size = found.buffers.get(name, []), largest.get(name.rpartition(".")[0], 0.0)
        compared.append((f"the buffer {name!r}", partial(_of_lists, values, others, size)))
    for name, values in truth.left.items():
        compared.append((name, partial(_of_lists, values, found.left.get(name, []))))
    return compared


def _joined(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """Values of the whole batch from those of its parts."""
    if len(parts) == 1:
        return [*parts[0]]
    return [
        torch.cat(column) if all(isinstance(x, Tensor) and x.dim() for x in column) else column[0]
        for column in map(list, zip(*parts, strict=True))
    ]


def _of_lists(ones: Sequence[Any], others: Sequence[Any], scale: float = 0.0) -> float:
    if len(ones) != len(others):
        return inf
    pairs = zip(ones, others, strict=True)
    return max((_relative(one, other, scale) for one, other in pairs), default=0.0)


def _relative(one: Any, other: Any, scale: float) -> float:
    """Norm of the difference over the norm of the first value.

    A gradient that is far smaller than others, such as that of a bias before a norm, is nothing but
    rounding, and so is the running mean of results that are centred, beside their variance. So the
    norm counts as at least a thousandth of `scale`.
    """
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        if one is None and isinstance(other, Tensor):
            one = torch.zeros_like(other)
        elif other is None and isinstance(one, Tensor):
            other = torch.zeros_like(one)
        else:
            is_number = isinstance(one, float) and isinstance(other, float)
            is_same = one == other or (is_number and isnan(one) and isnan(other))
            return inf if isinstance(one, (int, float, complex, str)) and not is_same else 0.0
    if one.shape != other.shape:
        return inf
    if not (one.is_floating_point() or one.is_complex()):
        return 0.0 if torch.equal(one, other) else inf
    # Where both are not finite, they are the same.
    if not torch.equal(one.isfinite(), other.isfinite()):
        return inf
    difference, size = _distance(one, other)
    return _fraction(difference, max(size, scale / 1000))


def _of_layouts(
    truth: Sequence[Sequence[Tensor]], found: Sequence[Sequence[Tensor]]
) -> tuple[float, float]:
    """The largest relative difference of any output, and the one of all gradients together.

    All gradients are compared together, because a single gradient may be nothing but rounding,
    such as the gradient of a bias before batch norm. Values that are not finite count as 0.
    """
    outputs, others = truth[0], found[0]
    if len(outputs) != len(others):
        return inf, inf
    each = [_of_all([one], [other]) for one, other in zip(outputs, others, strict=True)]
    return max(each, default=0.0), _of_all(truth[1], found[1])


def _of_all(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Norm of the difference of tensors over their norm, of all of them together."""
    if [one.shape for one in ones] != [other.shape for other in others]:
        return inf
    differences, sizes = [0.0], [0.0]
    for one, other in zip(ones, others, strict=True):
        if one.is_floating_point():
            difference, size = _distance(one, other)
            differences.append(one.numel() ** 0.5 * difference)
            sizes.append(one.numel() ** 0.5 * size)
    return _fraction(hypot(*differences), hypot(*sizes))


def _distance(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Sizes of the difference and of the first tensor, without values that are not finite."""
    a, b = (_dense(tensor).double().nan_to_num(0.0, 0.0, 0.0) for tensor in (one, other))
    return _size(a - b), _size(a)


def _fraction(difference: float, size: float) -> float:
    return 0.0 if difference == 0 else difference / size if size else inf


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _size(tensor: Tensor) -> float:
    """Root of the mean square."""
    dense = _dense(tensor).double()
    return float(dense.square().mean().sqrt()) if dense.numel() else 0.0
