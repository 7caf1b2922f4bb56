"""What each module of a step would cost as a segment, as input for the solver.

The costs of a module in the undivided step, which is foreseen, give estimates of what it would cost
as a segment. Once a step with this segment was foreseen, its costs there replace the estimate;
times are corrected by those of real steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import log2
from statistics import median
from typing import Any

from torch import nn

from ucudnn.execution.micro_batching import is_sequence
from ucudnn.segment import Segment, StepDivision, Stretch, is_inside, stretch_of
from ucudnn.solvers import Node, Option, OuterOption, SegmentTable, segment
from ucudnn.steps.foresee import Foreseer
from ucudnn.steps.profile import ModuleCall, ModuleCost, StepProfile
from ucudnn.system.processes import cached_property

# A module that could save less than this fraction of the peak of a step is no segment by itself; it
# counts as a part of the module around it.
_LEAST_SHARE = 0.01
# Sizes of micro-batches are the batch halved n times, for n below this number.
_MOST_HALVINGS = 7
# Resolution of the solver, as a fraction of the peak of the step: smaller differences of peaks do
# not matter.
_RESOLUTION = 1 / 4096
# If micro-batches are half as large, the whole batch is assumed to take 2 ** _HALVED_COST times as
# long, until such micro-batches are foreseen. So of sizes that fit, the largest comes first.
_HALVED_COST = 0.05
# Slabs have at least so many rows, at most so many sizes are considered, and at most so many parts:
# each takes time to start, and to foresee.
_LEAST_ROWS, _MOST_SIZES, _MOST_PARTS = 2, 7, 64
# So many modules show what slabs of others cost.
_MOST_SHOWN = 3
# Assumed bandwidth between a GPU and its host, in bytes per ns.
_LINK = 20
# Stretches of a sequence that are considered have so many children.
_STRETCHES = (2, 3, 4, 6, 8, 12, 16, 24)
_Key = tuple[Segment, int]


class SegmentCosts:
    """The costs of all segments of one step.

    Attributes:
        root: the undivided step as a call, which contains the calls that may be segments.
        samples: for each module or stretch that may be a segment, the samples of its calls.
        shapes: for each of these, the shape of its first argument.

    Args:
        foreseer: foresees steps of the model.
        own: the undivided step, foreseen.
        selective: the step in which everything is selectively recomputed; None: it fails.
        may_be: tells whether a segment may be chosen.
        excess_of: tells the rows of the halo of a segment in slabs, and its normalisations over
            rows, as far as they are known.
    """

    def __init__(
        self,
        foreseer: Foreseer,
        own: StepProfile,
        selective: StepProfile | None,
        may_be: Callable[[Segment], bool],
        excess_of: Callable[[Segment], tuple[int, int]],
    ) -> None:
        self._excess_of = excess_of
        self._modules: Mapping[str, nn.Module] = foreseer.modules
        self._is_training, self._own, self._may_be = foreseer.is_training, own, may_be
        self._offloads = self._is_training and foreseer.backend.device().type == "cuda"
        self._selective: dict[tuple[str | None, int], ModuleCost] = {}
        if selective is not None:
            self._selective = {one.key: selective.cost(one) for one in selective.root.walk()}
        # By segment and the number of the call of its module in the step.
        self._estimated: dict[_Key, Option] = {}
        self._foreseen: dict[_Key, Option] = {}  # in steps with this segment
        # Ratios of measured to foreseen times, by the keys of `_kinds`; of foreseen to estimated
        # times of slabs, by the names of innermost modules and by rows; and those that show this
        # for others.
        self._ratios: dict[Any, list[float]] = {}
        self._of_slabs: dict[str, dict[int, list[float]]] = {}
        self._representing: dict[str, set[str]] = {}
        self.samples: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.root = self._tree(own.root)

    def table(self) -> SegmentTable:
        """The divisions that no other beats in both peak and time, by the costs known so far."""
        resolution = max(1, round(self._own.own_bytes * _RESOLUTION))
        return segment(self._node(self.root), resolution)

    @cached_property
    def innermost(self) -> list[str]:
        """Modules and stretches that may be segments and have none inside."""
        outer = [name for name in self.samples if any(is_inside(n, name) for n in self.samples)]
        return [name for name in self.samples if name not in outer]

    @cached_property
    def alike(self) -> dict[str, str]:
        """For each innermost module or stretch, the first one with equal modules and shapes."""
        first = dict[Hashable, str]()
        return {
            name: first.setdefault((self.shapes[name], *map(repr, self._parts_of(name))), name)
            for name in self.innermost
        }

    def in_few_slabs(self, names: Collection[str]) -> list[Segment]:
        """Some of these modules, the largest, in slabs that show what slabs of others cost."""
        found = dict[str, list[Segment]]()
        for one, _ in sorted(self._estimated, key=lambda key: -self._estimated[key].peak_bytes):
            if one.rows and one.module in names and not one.kept and not one.selective:
                found.setdefault(one.module, []).append(one)
        # Of a medium size, along the axis that the largest slabs have.
        several = islice(found.values(), _MOST_SHOWN)
        along = ([one for one in each if one.axis == each[0].axis] for each in several)
        return [each[len(each) // 2] for each in along]

    def foreseen(self, division: StepDivision, profile: StepProfile) -> None:
        """Note what segments cost in a step that was foreseen."""
        for key, call in self._apart(division, profile.root):
            one, option = key[0], profile.cost(call).option(key[0])
            if one.rows is not None and key not in self._foreseen:
                estimated = self._with_halo(self._estimated[key])
                ratio = option.time_ns / max(1, estimated.time_ns)
                for name in self._inside(one.module):
                    found = self._of_slabs.setdefault(name, {})
                    found.setdefault(one.rows, []).append(ratio)
            self._foreseen[key] = option

    def measured(self, division: StepDivision, root: ModuleCall, times: Sequence[int]) -> None:
        """Note how long segments took in a real step, by the times of its marks in ns."""
        for key, call in self._apart(division, root):
            if key in self._foreseen:
                took = sum(times[b] - times[a] for a, b in (call.forward, call.backward or (0, 0)))
                ratio = took / max(1, self._foreseen[key].time_ns)
                for kind in self._kinds(key[0]):
                    self._ratios.setdefault(kind, []).append(ratio)

    def _apart(self, division: StepDivision, root: ModuleCall) -> Iterator[tuple[_Key, ModuleCall]]:
        """The segments that have costs of their own in a step, with the calls of their modules."""
        segments = segments_apart(division)
        for call in root.walk():
            if call.name is not None:
                own = segments[call.name]
                one = replace(own, shared=(), training=None, lists=None, inference=(), least=1)
                one = replace(one, halo=(0, 0), unit=1, rates=None, norms=())
                if (one, call.number) in self._estimated:
                    yield (one, call.number), call

    def _tree(self, root: ModuleCall) -> ModuleCall:
        """The tree of those calls only that may be segments; their estimated costs are noted."""
        least = _LEAST_SHARE * self._own.own_bytes

        def matters(call: ModuleCall) -> bool:
            if not call.samples:
                return False
            cost = self._own.cost(call)
            if not self._is_training:
                return cost.forward_bytes - call.result_bytes >= least
            return len(call.backward) == 2 and cost.kept_bytes - call.result_bytes >= least

        def pruned(call: ModuleCall, *, is_kept: bool) -> Iterator[ModuleCall]:
            # Stretches of a sequence are told by the places of all its children.
            keeps = self._is_sequence(call.name)
            children = [one for child in call.children for one in pruned(child, is_kept=keeps)]
            if is_kept or matters(call):
                yield replace(call, children=children)
            else:
                yield from children

        (top,) = pruned(root, is_kept=True)
        for call in top.walk():
            if call.name is not None and matters(call):
                for one in (call, *filter(matters, self._stretches_of(call))):
                    self._estimate(one)
        return top

    def _is_sequence(self, name: str | None) -> bool:
        return name is not None and is_sequence(self._modules[name])

    def _stretches_of(self, call: ModuleCall) -> list[ModuleCall]:
        """Stretches of a sequence, each as one call; none if it is no sequence."""
        children = call.children
        is_whole = self._is_sequence(call.name) and len(children) == len(
            self._modules[call.name or ""]._modules
        )
        if not is_whole or not call.is_nested:
            return []
        found = []
        for size in (one for one in _STRETCHES if one < len(children)):
            for begin in range(0, len(children) - 1, size):
                inner = children[begin : begin + size]
                first, last = inner[0], inner[-1]
                if len(inner) > 1 and all(len(one.backward) == 2 for one in inner):
                    name = str(Stretch(call.name or "", begin, begin + len(inner)))
                    found.append(
                        ModuleCall(
                            name,
                            [first.forward[0], last.forward[1]],
                            [last.backward[0], first.backward[1]],
                            inner,
                            first.samples,
                            last.result_bytes,
                            first.argument_bytes,
                            call.number,
                            shape=first.shape,
                        )
                    )
        return found

    def _parts_of(self, name: str) -> list[nn.Module]:
        """A module, or the children of a stretch."""
        stretch = stretch_of(name) if name not in self._modules else None
        if stretch is None:
            return [self._modules[name]]
        return [*self._modules[stretch.module].children()][stretch.begin : stretch.end]

    def _estimate(self, call: ModuleCall) -> None:
        """Note each segment that this call could be run as, with its estimated cost."""
        assert call.name is not None
        cost, name = self._own.cost(call), call.name
        self.samples[name], self.shapes[name] = call.samples, call.shape
        gradients = sum(
            one.numel() * one.element_size()
            for part in self._parts_of(name)
            for one in part.parameters()
            if one.requires_grad
        )
        selective = self._selective.get(call.key, cost)
        # Modules without normalisations and activation functions gain nothing.
        gains = selective.kept_bytes < cost.kept_bytes
        options = []
        if gains:
            one = Segment(name, None, recompute=False, selective=True)
            options.append(selective.option(one))
        for one, part, count in [*_in_micro_batches(call), *_in_slabs(call)]:
            if self._is_training:
                for kept in _kept_of(count):
                    each = replace(one, kept=kept)
                    options.append(_recomputed(call, cost, part, gradients, each, count))
                    if gains:
                        each = replace(each, selective=True)
                        options.append(_recomputed(call, selective, part, gradients, each, count))
            elif count > 1:
                each = replace(one, recompute=False)
                peak = call.result_bytes + round(part * cost.forward_bytes)
                time_ns = round(cost.forward_ns * part**-_HALVED_COST)
                options.append(Option(cost.kept_bytes, peak, time_ns, each))
        if self._offloads:
            one = Segment(name, None, recompute=False, offload=True)
            moved = cost.kept_bytes - call.result_bytes
            time_ns = cost.forward_ns + cost.backward_ns + 2 * moved // _LINK
            peak = max(cost.forward_bytes, cost.backward_bytes - moved)
            options.append(Option(call.result_bytes, peak, time_ns, one))
        self._estimated |= {(option.choice, call.number): option for option in options}

    def _node(self, call: ModuleCall) -> Node:
        options = self._options(call)
        if not (call.children and call.is_nested):
            return Node((self._own.cost(call).option(None), *options))
        between = [Node((option,)) for option in self._own.between(call)]
        children = [between[0]]
        for child, after in zip(call.children, between[1:], strict=True):
            children += [self._node(child), after]
        stretches = []
        for one in self._stretches_of(call):
            found = self._options(one)
            stretch = stretch_of(one.name or "")
            assert stretch is not None
            # Between two children, and before the first one, there is a node of its own.
            begin, end = 2 * stretch.begin + 1, 2 * stretch.end
            inside = Node(children=tuple(children[begin:end]))
            outer = self._outer_options(one, inside)
            if found or outer:
                stretches.append((begin, end, Node(tuple(found), outer=outer)))
        inside = Node(children=tuple(children), stretches=tuple(stretches))
        outer = self._outer_options(call, inside)
        return Node(tuple(options), inside.children, outer, inside.stretches)

    def _options(self, call: ModuleCall) -> list[Option]:
        return [
            self._corrected(self._foreseen.get((one, number)) or self._as_others(option))
            for (one, number), option in self._estimated.items()
            if one.module == call.name and number == call.number and self._may_be(one)
        ]

    def _as_others(self, option: Option) -> Option:
        """An estimated option; of slabs, corrected by what other slabs were foreseen to take.

        Operators on slabs may be faster than on the whole, whose tensors leave the cache and, on a
        CPU, get fresh pages from malloc each time.
        """
        one = option.choice
        if one.rows is None:
            return option
        option, known = self._with_halo(option), self._of_slabs
        inside = [known[name] for name in self._inside(one.module) if name in known]
        ratios = [_at(one.rows, found) for found in inside or known.values()]
        # Of modules unlike those that were foreseen in slabs, no gain is expected.
        ratio = median(ratios) if inside else max(1, median(ratios or [1]))
        return replace(option, time_ns=round(option.time_ns * ratio))

    def _inside(self, name: str) -> set[str]:
        """Those that stand for the innermost modules inside a module, or for the module itself."""
        if name not in self._representing:
            self._representing[name] = {
                one for other, one in self.alike.items() if name == other or is_inside(other, name)
            }
        return self._representing[name]

    def _with_halo(self, option: Option) -> Option:
        """An estimated option in slabs, with what is computed for the halo and for statistics."""
        one = option.choice
        halo, norms = self._excess_of(one)
        factor = 1 + halo / one.rows
        inside = round((option.peak_bytes - option.kept_bytes) * factor)
        # For the statistics of each normalisation, half of the module runs once more on average.
        time_ns = round(option.time_ns * factor * (1 + norms / 2))
        return replace(option, peak_bytes=max(0, option.kept_bytes + inside), time_ns=time_ns)

    def _outer_options(self, call: ModuleCall, inside: Node) -> tuple[OuterOption, ...]:
        """A call recomputed as a whole, around a division of its inside."""
        if not (call.name and call.children and self._is_training):
            return ()
        one = Segment(call.name, None)
        if (one, call.number) not in self._estimated or not self._may_be(one):
            return ()
        cost, result = self._own.cost(call), call.result_bytes
        # In the first forward, nothing is kept but the result of each child.
        peak = max(
            self._own.cost(child).forward_bytes + child.argument_bytes for child in call.children
        )
        return (OuterOption(result, result + peak, cost.forward_ns, one, inside, result),)

    def _corrected(self, option: Option) -> Option:
        """The option with a time that is corrected by times of real steps."""
        known = next(filter(None, map(self._ratios.get, self._kinds(option.choice))), None)
        return replace(option, time_ns=round(option.time_ns * median(known))) if known else option

    def _kinds(self, one: Segment) -> tuple[Any, ...]:
        """Whose ratios to trust for a segment: those of the same module, then of the same kind."""
        size, rows = one.micro_batch, one.rows
        count = 1 if size is None else -(-self.samples[one.module] // size)
        slabs = 0 if rows is None else -(-self.shapes[one.module][one.axis] // rows)
        how = one.recompute, one.selective
        return (one.module, size, rows, one.axis, one.selective), (count, slabs, *how)


def segments_apart(division: StepDivision) -> dict[str, Segment]:
    """The segments that have costs of their own in a step: those around or inside no other one."""
    names = {one.module: one for one in division.segments}
    if division.micro_batch is not None:
        return {}
    return {
        name: one
        for name, one in names.items()
        if not any(is_inside(name, other) or is_inside(other, name) for other in names)
    }


def halved(samples: int) -> list[int]:
    """Sizes of micro-batches: all samples, half of them, a quarter and so on.

    >>> halved(12)
    [12, 6, 3, 1]
    """
    return [samples >> n for n in range(_MOST_HALVINGS) if samples >> n]


def axes_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The axes of a tensor that may have rows for slabs: the first spatial one, or both of two.

    >>> axes_of((1, 3, 64, 64)), axes_of((1, 50, 768)), axes_of((8, 3))
    ((2,), (1, 2), ())
    """
    axes = (2,) if len(shape) > 3 else (1, 2) if len(shape) == 3 else ()
    return tuple(one for one in axes if shape[one] >= 2 * _LEAST_ROWS)


def _in_micro_batches(call: ModuleCall) -> Iterator[tuple[Segment, float, int]]:
    """The call whole and in micro-batches: each, the part of it that runs at once, and how many."""
    for size in halved(call.samples):
        count = -(-call.samples // size)
        yield Segment(call.name or "", size if count > 1 else None), size / call.samples, count


def _in_slabs(call: ModuleCall) -> Iterator[tuple[Segment, float, int]]:
    """The call in slabs of one sample each, in the same way."""
    for axis in axes_of(call.shape):
        length = call.shape[axis]
        sizes = [2**n for n in range(length.bit_length()) if _LEAST_ROWS <= 2**n < length]
        for rows in sizes[-_MOST_SIZES:]:
            size = 1 if call.samples > 1 else None
            part, count = rows / length / call.samples, -(-length // rows) * call.samples
            if count <= _MOST_PARTS:
                yield Segment(call.name or "", size, rows=rows, axis=axis), part, count


def _at(rows: int, ratios: Mapping[int, list[float]]) -> float:
    """The ratio at the size of slabs that is nearest to a number of rows, by its logarithm."""
    nearest = min(ratios, key=lambda known: abs(log2(known / rows)))
    return median(ratios[nearest])


def _kept_of(count: int) -> list[int]:
    """Out of `count` micro-batches, the numbers that segments may keep and not recompute."""
    return sorted({0, 1, count // 4, count // 2, 3 * count // 4}) if count > 1 else [0]


def _recomputed(
    call: ModuleCall, cost: ModuleCost, part: float, gradients: int, one: Segment, count: int
) -> Option:
    """The estimated cost of a call as a segment that recomputes the parts that it does not keep.

    `cost` is that of the call in the undivided step, `part` the fraction of the call that runs at
    once, `gradients` the bytes of the gradients of the module's parameters, and `count` the number
    of parts.
    """
    result = call.result_bytes
    inside = round(part * (cost.kept_bytes - result))
    # The last part, which is kept first of all, may be smaller than the others.
    kept_part = max(0.0, 1 - (count - one.kept) * part) if one.kept else 0.0
    kept = round(kept_part * (cost.kept_bytes - result))
    beside = min(cost.beside_bytes + gradients, cost.backward_bytes)
    transient = max(0, cost.backward_bytes - cost.kept_bytes - beside)
    # In forward, the results of all micro-batches and the whole result that they are copied into
    # are in memory at once; those of slabs are written into it one by one.
    is_joined = part < 1 and one.rows is None
    forward = (2 if is_joined else 1) * result + round(part * cost.forward_bytes)
    forward += max(0, kept - inside)
    # In backward, the kept micro-batches come first; the others use the memory that these free. At
    # its end, the gradients of all micro-batches are copied into the gradient of the argument.
    backward = max(kept, inside) + round(part * transient + (1 - part) * call.argument_bytes)
    if is_joined:
        backward = max(backward, 2 * call.argument_bytes)
    backward += result + beside
    forward_ns = (2 - kept_part) * cost.forward_ns
    time_ns = round((forward_ns + cost.backward_ns) * part**-_HALVED_COST)
    return Option(result + kept, max(forward, backward), time_ns, one)
