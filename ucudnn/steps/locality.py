"""Find out whether a module may run in slabs, by runs on its real arguments.

Rows of the arguments are made NaN: how far away they must be, so that rows of the results stay what
they are, is the halo. Slabs are cut elsewhere: by how many rows they may be moved is the unit. Then
the module runs in slabs, forward and backward, and must compute what it computes as a whole. No
list of module types is consulted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ucudnn.benchmark.failures import is_out_of_memory
from ucudnn.errors import PlanError, first_line
from ucudnn.execution.nesting import put_together, take_apart
from ucudnn.execution.slabs import has_axis
from ucudnn.execution.statistics import NormsByStatistics, Statistics
from ucudnn.kernels.deadline import Deadline
from ucudnn.segment import Segment
from ucudnn.steps.run import STEP_ERRORS
from ucudnn.steps.trial import Trial, are_other, are_other_gradients, weights_of

# Reasons against slabs.
_NO_AXIS = "its arguments have no such axis"
NO_TIME = "there was no time to find out whether it may run in slabs"
_ALL_ROWS = "its results depend on rows that are far away"
# For each normalisation over rows, the module runs once more, up to it.
_MOST_NORMS = 4
# Units that are tried, powers of two first: most modules halve or double what they are given.
_UNITS = (
    *(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    *(3, 5, 6, 7, 9, 10, 12, 20, 24, 40, 48, 80, 96, 160, 192, 320, 384, 640),
)
# Slabs are cut at one of these multiples of a unit, so that they are at no multiple of another one.
_PRIMES = (127, 61, 31, 17, 13, 11, 1)
# Arguments are shortened along their axes, while as many elements are left, because a few rows and
# columns show what all of them would show. The rest of a division by the last number stays.
_LEAST_ROWS, _LEAST_COLUMNS, _PERIOD = 192, 16, 64
# A module with one spatial axis is examined on at least so many rows.
_LEAST_LENGTH = 4096
# A trial takes about so many times as long as a forward.
_FORWARDS = 30


@dataclass(frozen=True, slots=True)
class Locality:
    """Which rows of a module's arguments its results depend on.

    Args:
        reason: why it cannot run in slabs of rows; "" if it can.
        halo: as in `Segment`; and so are unit, rates and norms.
    """

    reason: str = ""
    halo: tuple[int, int] = (0, 0)
    unit: int = 1
    rates: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    norms: tuple[int, ...] = ()

    @property
    def is_final(self) -> bool:
        """True if all rows and columns would show what some of them have shown."""
        return self.reason in ("", NO_TIME, _ALL_ROWS)

    def described(self, segment: Segment) -> Segment:
        """The segment with what was found out about its module filled in."""
        found, norms = replace(segment, halo=self.halo, unit=self.unit), self.norms
        return replace(found, rates=self.rates, norms=norms)

    def united(self, other: Locality) -> Locality:
        """What holds for two calls of a module."""
        if self.reason or other.reason:
            return self if self.reason else other
        if (self.unit, self.rates, self.norms) != (other.unit, other.rates, other.norms):
            return Locality("its calls do not have the same rows")
        before, after = zip(self.halo, other.halo, strict=True)
        return replace(self, halo=(max(before), max(after)))


def locality(trial: Trial, arguments: Any, axis: int, deadline: Deadline) -> Locality:
    """Find out which rows of a module's arguments its results depend on.

    Args:
        trial: of a call of the module, which is known to compute the same again.
        arguments: of that call, or some samples of them.
        axis: the axis that has the rows.
        deadline: after it, nothing is tried.
    """
    found = Locality(_NO_AXIS)
    for part in crops(arguments, axis):
        every = _lengths(take_apart(part)[0], axis)
        first = next((n for n, one in enumerate(every) if one), 0)
        alone = [one if n == first else 0 for n, one in enumerate(every)]
        for lengths in [every] if every == alone else [every, alone]:
            try:
                found = _Rows(trial, part, axis, lengths).finding(deadline)
            except STEP_ERRORS as error:
                if is_out_of_memory(error):
                    raise
                found = Locality(f"it fails on some of its rows ({first_line(error)})")
            if found.is_final:
                return found
    return found


def _lengths(leaves: Sequence[Any], axis: int) -> list[int]:
    """The rows of each argument that may be cut; 0 for others."""
    counts = [one.shape[axis] if has_axis(one, axis) else 0 for one in leaves]
    dims = next((one.dim() for one, count in zip(leaves, counts, strict=True) if count > 1), 0)
    pairs = zip(leaves, counts, strict=True)
    return [count if count > 1 and one.dim() == dims else 0 for one, count in pairs]


def crops(arguments: Any, axis: int) -> Iterator[Any]:
    """The arguments with fewer rows and columns, if there are more than needed, and all of them."""
    leaves, nest = take_apart(arguments)
    rows = [one for one, count in zip(leaves, _lengths(leaves, axis), strict=True) if count]
    if not rows:
        return
    dims = rows[0].dim()
    shorter = dict[int, Callable[[int], int]]()
    for other in range(2, dims):
        least = _LEAST_COLUMNS if other != axis else _LEAST_ROWS if dims > 3 else _LEAST_LENGTH
        if dims > 3 or other == axis:
            shorter[other] = _shortened({one.shape[other] for one in rows}, least)
    part = [
        one[tuple(slice(shorter.get(n, int)(size)) for n, size in enumerate(one.shape))]
        if isinstance(one, Tensor) and any(one is other for other in rows)
        else one
        for one in leaves
    ]
    if any(a is not b and a.shape != b.shape for a, b in zip(part, leaves, strict=True)):
        yield put_together(part, nest)
    yield arguments


def _shortened(lengths: set[int], least: int) -> Callable[[int], int]:
    """What shortens an axis of several tensors, and keeps what strides and ratios leave of it."""
    if len(lengths) == 1:
        return lambda size: size if size < least else least + (size - least) % _PERIOD
    halvings = 0
    while min(lengths) >> halvings >= 2 * least and not any(
        one % (2 << halvings) for one in lengths
    ):
        halvings += 1
    return lambda size: size >> halvings


class _Rows:
    """Finds out which rows a module's results depend on.

    Args:
        trial: of a call.
        arguments: those by which it is called.
        axis: the axis that has the rows.
        lengths: the rows of each argument that is cut; 0 for others.
    """

    def __init__(self, trial: Trial, arguments: Any, axis: int, lengths: list[int]) -> None:
        self._trial, self._axis, self._lengths = trial, axis, lengths
        self._leaves, self._nest = take_apart(arguments)
        self._count = next(filter(None, lengths))
        # Of the normalisations over rows.
        self._known, self._rows = list[Statistics](), list[int]()

    def finding(self, deadline: Deadline) -> Locality:
        """Which rows the results depend on."""
        began = deadline.clock()
        with torch.no_grad():
            whole, norms = self._run(self._all())
            if not deadline.has_time(_FORWARDS, (deadline.clock() - began) * 1e9):
                return Locality(NO_TIME)
            self._known, self._rows = norms.own, norms.rows
            found = self._reach(whole)
        if found.reason:
            return found
        tried = self._in_slabs(found)
        # Rows of a result may depend on no row of an argument, as where a transposed convolution
        # has a stride larger than its kernel, and yet be cut off with the rows beside them.
        wider = replace(found, halo=(found.halo[0] + found.unit, found.halo[1] + found.unit))
        return self._in_slabs(wider) if tried.reason else tried

    def _reach(self, whole: Sequence[Any]) -> Locality:
        """The halo and the unit, as far as NaN and parts of the rows show them."""
        if len(self._known) > _MOST_NORMS:
            return Locality(f"it has {len(self._known)} normalisations over rows")
        if not any(has_axis(one, self._axis) for one in whole):
            return Locality("its results have no such axis")
        # Most modules that cannot run in slabs are told by one more run.
        far = self._results(self._without(0, self._count // 2))
        if are_other(self._ends(whole), self._ends(far)):
            return Locality(_ALL_ROWS)
        found = next(filter(None, (self._unit(one, whole) for one in _UNITS)), None)
        if found is None:
            return Locality("parts of its rows give other results")
        return self._with_halo(found, whole)

    def _all(self) -> Any:
        return put_together(self._leaves, self._nest)

    def _run(self, arguments: Any) -> tuple[list[Any], NormsByStatistics]:
        """The results of a call by the known statistics, and what it knows of normalisations."""
        with NormsByStatistics(self._axis, self._known) as norms:
            return self._trial.run(arguments).results, norms

    def _results(self, arguments: Any) -> list[Any]:
        return self._run(arguments)[0]

    def _ends(self, results: Sequence[Any]) -> list[Any]:
        """The last row of each result."""
        return [
            one.narrow(self._axis, rows - 1, 1) if rows else one
            for one, rows in zip(results, self._counts(results), strict=True)
        ]

    def _without(self, begin: int, end: int) -> Any:
        """The arguments with NaN, or a row that is there already, in rows from `begin` to `end`."""
        leaves = [*self._leaves]
        for n, length in enumerate(self._lengths):
            if not length:
                continue
            first, last = (
                one * length // self._count if one < self._count else length for one in (begin, end)
            )
            one = leaves[n].detach().clone()
            rows = one.narrow(self._axis, first, last - first)
            if one.is_floating_point() or one.is_complex():
                rows.fill_(float("nan"))
            elif last > first:
                rows.copy_(
                    one.narrow(self._axis, length - 1 if not first else 0, 1).expand_as(rows)
                )
            leaves[n] = one.requires_grad_(self._leaves[n].requires_grad)
        return put_together(leaves, self._nest)

    def _unit(self, unit: int, whole: Sequence[Any]) -> Locality | None:
        """The unit with its rates, if the module may be called on rows that begin at a multiple."""
        times = next((one for one in _PRIMES if one * unit <= self._count // 2), 0)
        rates = [round(length * unit / self._count) for length in self._lengths]
        pairs = zip(self._lengths, rates, strict=True)
        if not times or any(length and not rate for length, rate in pairs):
            return None
        leaves = [
            one.narrow(self._axis, times * rate, length - times * rate) if rate else one
            for one, length, rate in zip(self._leaves, self._lengths, rates, strict=True)
        ]
        try:
            found, norms = self._run(put_together(leaves, self._nest))
        except STEP_ERRORS as error:
            if is_out_of_memory(error):
                raise
            return None
        own = _rates(self._counts(whole), self._counts(found), times)
        of_norms = _rates(self._rows, norms.rows, times)
        if own is None or of_norms is None or not any(own) or not all(of_norms):
            return None
        if are_other(self._ends(whole), self._ends(found)):
            return None
        return Locality(unit=unit, rates=(tuple(rates), own), norms=of_norms)

    def _counts(self, results: Sequence[Any]) -> list[int]:
        """The rows of each result; 0 if it has none."""
        return [one.shape[self._axis] if has_axis(one, self._axis) else 0 for one in results]

    def _with_halo(self, found: Locality, whole: Sequence[Any]) -> Locality:
        unit = found.unit
        middle = self._count // 2 // unit * unit

        def is_enough(halo: int, *, is_before: bool) -> bool:
            """True if rows that far from the middle do not reach what is on its other side."""
            rows = (0, middle - halo) if is_before else (middle + halo, self._count)
            changed = self._results(self._without(*rows))
            parts = list[list[Any]]()
            for results in (whole, changed):
                parts.append([])
                for one, rate in zip(results, found.rates[1], strict=True):
                    if rate:
                        row = middle * rate // unit
                        length = one.shape[self._axis] - row if is_before else row
                        parts[-1].append(one.narrow(self._axis, row if is_before else 0, length))
            return not are_other(*parts)

        halo = list[int]()
        for is_before in (True, False):
            low, most = 0, (middle if is_before else self._count - middle) // unit
            high = min(1, most)  # most halos are small
            while high < most and not is_enough(high * unit, is_before=is_before):
                low, high = high + 1, min(2 * high, most)
            while low < high:
                half = (low + high) // 2
                if is_enough(half * unit, is_before=is_before):
                    high = half
                else:
                    low = half + 1
            if unit * high >= middle:
                return Locality(_ALL_ROWS)
            halo.append(unit * high)
        return replace(found, halo=(halo[0], halo[1]))

    def _in_slabs(self, found: Locality) -> Locality:
        """What was found, if slabs compute what the whole does, forward and backward."""
        trial, unit = self._trial, found.unit
        # Three slabs and a shorter one.
        rows = max(unit, self._count * 2 // 7 // unit * unit)
        segment = found.described(Segment("", rows=rows, axis=self._axis))
        whole = trial.run(self._all())
        before, trial.weights = trial.weights, [weights_of(one) for one in whole.results]
        try:
            whole, gradients = trial.with_gradients(whole)
            try:
                slabs = trial.run(self._all(), slabs=segment)
            except PlanError as error:
                return Locality(str(error))
            if slabs.nest != whole.nest or are_other(whole.results, slabs.results):
                return Locality("slabs of its rows give other results")
            if are_other_gradients(gradients, trial.gradients(slabs), trial.eps(whole)):
                return Locality("slabs of its rows give other gradients")
        finally:
            trial.weights = before
        return found


def _rates(whole: Sequence[int], fewer: Sequence[int], times: int) -> tuple[int, ...] | None:
    """The rows that belong to a unit, where so many units are missing; None if they follow none."""
    if len(whole) != len(fewer):
        return None
    missing = [a - b for a, b in zip(whole, fewer, strict=True)]
    is_possible = all(one >= 0 and not one % times for one in missing)
    return tuple(one // times for one in missing) if is_possible else None
