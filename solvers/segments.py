"""Choose how to run each module of a step, for every limit of the step's peak memory at once.

The module that runs first in forward runs last in backward. So the tensors that a module keeps for
its backward stay allocated while all later modules run. While a module runs, a step needs the bytes
that all earlier modules keep, plus the bytes that this module needs. A dynamic program goes from
the last module to the first. Of all later modules together it needs only two numbers: their time,
and the bytes that they need above what is allocated when they begin.

A module may run around a division of its inside: it is recomputed, and what runs then is divided,
too. While the inside runs, nothing of it is kept for later modules. So it is a step of its own, and
of this step again only two numbers are needed: its peak and its time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ucudnn.errors import ConfigError, PlanError, quoted
from ucudnn.solvers._base import SAFE, Integers, require_int, require_limit
from ucudnn.units import format_bytes


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a module in a step, forward and backward.

    >>> Option(kept_bytes=-4, peak_bytes=16, time_ns=900, choice="micro-batches of 8").kept_bytes
    -4

    Args:
        kept_bytes: bytes that the module keeps from the end of its forward until its backward;
            negative if it frees more than it keeps.
        peak_bytes: the most bytes that are allocated at any moment of its forward or backward,
            above what was allocated before its forward.
        time_ns: time in ns of its forward and backward.
        choice: any value by which the caller recognises the option.

    Raises:
        ConfigError: a number is not an int or out of range.
    """

    kept_bytes: int
    peak_bytes: int
    time_ns: int
    choice: Any

    def __post_init__(self) -> None:
        if type(self.kept_bytes) is not int:
            raise ConfigError(
                f"kept_bytes of an option must be an int, got {quoted(self.kept_bytes)}"
            )
        require_int("peak_bytes of an option", self.peak_bytes, 0)
        require_int("time_ns of an option", self.time_ns, 0)


@dataclass(frozen=True, slots=True)
class OuterOption:
    """One way to run a module in a step around a division of its inside.

    >>> inside = Node((Option(0, 8, 30, "at once"), Option(0, 4, 40, "in two parts")))
    >>> outer = OuterOption(1, 2, 10, "recomputed", inside)
    >>> segment(Node(outer=(outer,))).front()
    [(4, 50), (8, 40)]

    Args:
        kept_bytes: as of an option.
        peak_bytes: the least peak of the module, however its inside runs.
        time_ns: time in ns that it takes beside its inside, such as that of an additional forward.
        choice: as of an option.
        inside: what runs inside it, as a step of its own.
        beside_bytes: bytes that are allocated beside the inside while it runs.

    Raises:
        ConfigError: a number is not an int or out of range, or the inside is no node.
    """

    kept_bytes: int
    peak_bytes: int
    time_ns: int
    choice: Any
    inside: Node
    beside_bytes: int = 0

    def __post_init__(self) -> None:
        Option(self.kept_bytes, self.peak_bytes, self.time_ns, self.choice)
        require_int("beside_bytes of an option", self.beside_bytes, 0)
        if type(self.inside) is not Node:
            raise ConfigError(
                f"inside of an option must be a ucudnn.solvers.Node, got {quoted(self.inside)}"
            )


@dataclass(frozen=True, slots=True)
class Node:
    """A module of a step: it runs by one of its options, as a whole or around, or child by child.

    >>> whole, part = Option(0, 8, 30, "whole"), Option(4, 6, 10, "part")
    >>> len(Node((whole,), children=(Node((part,)), Node((part,)))).children)
    2

    Args:
        options: ways to run the module as a whole.
        children: the modules inside it in the order of their forward; operations between these
            modules are nodes with one option.
        outer: ways to run the module around a division of its inside.
        stretches: neighbours among the children that may run as one node instead: the place of the
            first of them, the place after the last, and this node. They may overlap.

    Raises:
        ConfigError: the node has neither an option nor a child, a value has a wrong type, or there
            are no such children.
    """

    options: tuple[Option, ...] = ()
    children: tuple[Node, ...] = ()
    outer: tuple[OuterOption, ...] = ()
    stretches: tuple[tuple[int, int, Node], ...] = ()

    def __post_init__(self) -> None:
        for name, values, kind in (
            ("options", self.options, Option),
            ("children", self.children, Node),
            ("outer", self.outer, OuterOption),
        ):
            if type(values) is not tuple or any(type(value) is not kind for value in values):
                raise ConfigError(
                    f"{name} of a node must be a tuple of ucudnn.solvers.{kind.__name__} values, "
                    f"got {quoted(values)}"
                )
        if not (self.options or self.children or self.outer):
            raise ConfigError("a node must have an option or a child, got neither")
        for begin, end, node in self.stretches:
            if type(node) is not Node or not 0 <= begin < end <= len(self.children):
                raise ConfigError(
                    f"a stretch of a node must have two places among its {len(self.children)} "
                    f"children and a ucudnn.solvers.Node, got {quoted((begin, end, node))}"
                )


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """Result of `segment`: the front of a step, and the options that make each of its points.

    The options of a point are read from a log, whose entries are linked.

    >>> root = Node((Option(0, 8, 30, "whole"),), (Node((Option(4, 6, 10, "part"),)),) * 2)
    >>> table = segment(root)
    >>> table.front()
    [(8, 30), (10, 20)]
    >>> table.time_ns(9), [option.choice for option in table.choose(limit=None)]
    (30, ['part', 'part'])

    Args:
        peaks: bytes of each point, ascending.
        times: ns of each point, strictly descending.
        entries: for each point, the entry of the log that holds its first option.
        options: the options of all nodes.
        insides: for each of these, the entry of the first option inside it; 0 if there is none.
        picked: for each entry of the log, the index of its option.
        following: for each entry of the log, the entry of the option that runs next; 0 at the end
            of the step, or of what is inside an option.
    """

    peaks: list[int]
    times: list[int]
    entries: list[int]
    options: list[Option | OuterOption]
    insides: list[int]
    picked: Integers
    following: Integers

    @property
    def smallest_bytes(self) -> int:
        """The smallest peak of any choice, exact at any resolution."""
        return self.peaks[0]

    def front(self) -> list[tuple[int, int]]:
        """Pareto front of the step: peak in bytes ascending, time in ns strictly descending."""
        return list(zip(self.peaks, self.times, strict=True))

    def time_ns(self, limit: int | None = None) -> int | None:
        """Time of the fastest choice whose peak is within a limit; None if nothing fits.

        Args:
            limit: peak in bytes, None for any.
        """
        place = self._place(limit)
        return None if place is None else self.times[place]

    def choose(self, limit: int | None = None) -> tuple[Option | OuterOption, ...]:
        """The options of the fastest choice within a limit, in the order of their forward.

        An option around a division is followed by those that were chosen inside it.

        Args:
            limit: peak in bytes, None for any.

        Raises:
            PlanError: no choice fits; the error carries the smallest peak.
        """
        place = self._place(limit)
        if place is None:
            assert limit is not None  # without a limit, everything fits
            raise PlanError(
                f"no choice of segments keeps the peak of the step within a limit of "
                f"{format_bytes(limit)}; the smallest needs {format_bytes(self.smallest_bytes)}; "
                f"raise the limit",
                self.smallest_bytes,
            )
        return tuple(self._chosen(self.entries[place]))

    def _place(self, limit: int | None) -> int | None:
        require_limit("limit", limit)
        within = len(self.peaks) if limit is None else bisect_right(self.peaks, limit)
        return within - 1 if within else None

    def _chosen(self, entry: int) -> Iterator[Option | OuterOption]:
        while entry:
            picked = self.picked[entry]
            yield self.options[picked]
            yield from self._chosen(self.insides[picked])
            entry = self.following[entry]


def segment(root: Node, resolution_bytes: int = 1) -> SegmentTable:
    """Find the fastest choice of options for a step, for every limit of the step's peak at once.

    >>> first = Node((Option(8, 10, 5, "as it is"), Option(2, 10, 8, "recomputed")))
    >>> last = Node((Option(8, 10, 5, "as it is"), Option(2, 10, 8, "recomputed")))
    >>> table = segment(Node(children=(first, last)))
    >>> table.front()
    [(12, 13), (18, 10)]
    >>> [option.choice for option in table.choose(limit=12)]
    ['recomputed', 'as it is']

    By default the front is exact, and may have as many points as there are choices. If
    `resolution_bytes` is larger than 1, of all points between two multiples of it only the fastest
    is kept; the point of the smallest peak is always kept. Every point still has the true peak and
    time of its choice. For any choice of m options there is a point that is no slower, and whose
    peak is larger by less than m times the resolution.

    If several options of a node give the same memory and time, together with all that follows, the
    first option is chosen. An option of the node is chosen before options around its inside, and
    these before options of its children. A child's own options are chosen before those of stretches
    that begin with it.

    Args:
        root: the whole step.
        resolution_bytes: difference of peaks in bytes that does not matter, for each option chosen;
            with 1 the front is exact.

    Raises:
        ConfigError: an argument is out of range.
    """
    if type(root) is not Node:
        raise ConfigError(f"root must be a ucudnn.solvers.Node, got {quoted(root)}")
    require_int("resolution_bytes", resolution_bytes, 1)
    return _Search(root, resolution_bytes).table()


@dataclass(frozen=True, eq=False)
class _Rest:
    """Pareto front of the rest of a step, which is everything from some module on.

    Args:
        rooms: bytes that the rest needs above what is allocated when it begins, ascending.
        times: time of each point in ns, strictly descending.
        entries: for each point, the entry of the log that holds its first option.
    """

    rooms: Integers
    times: Integers
    entries: Integers


class _Search:
    """The dynamic program; its log says which option and which later point make each point."""

    def __init__(self, root: Node, resolution_bytes: int) -> None:
        self._root = root
        self._resolution = resolution_bytes
        self._options: list[Option | OuterOption] = []
        self._insides: list[int] = []
        # Fronts of nodes inside options, by id: several options may have the same inside.
        self._alone: dict[int, _Rest] = {}
        # Entry 0 is the end of the step.
        self._log = [(np.zeros(1, np.int32), np.zeros(1, np.int64))]
        self._entries = 1

    def table(self) -> SegmentTable:
        """The front of the whole step: that of the root, with nothing after it."""
        most = max(_most(self._root, {}), self._resolution)
        none = np.zeros(1, np.int64 if most < SAFE else object)
        self._end = _Rest(none, none, np.zeros(1, np.int64))
        front = self._ahead(self._root, self._end)
        return SegmentTable(
            peaks=front.rooms.tolist(),
            times=front.times.tolist(),
            entries=front.entries.tolist(),
            options=self._options,
            insides=self._insides,
            picked=np.concatenate([picked for picked, _ in self._log]),
            following=np.concatenate([following for _, following in self._log]),
        )

    def _ahead(self, node: Node, rest: _Rest) -> _Rest:
        """The front of a node with all that follows it; `rest` is the front of what follows."""
        rooms = [np.maximum(rest.rooms + o.kept_bytes, o.peak_bytes) for o in node.options]
        times = [rest.times + o.time_ns for o in node.options]
        # The points of the node's own options come first: each option with each point of `rest`.
        count = len(node.options) * len(rest.rooms)
        others = [self._around(option, rest) for option in node.outer]
        if node.children:
            others.append(self._along(node, rest))
        room = np.concatenate([*rooms, *(one.rooms for one in others)])
        time = np.concatenate([*times, *(one.times for one in others)])
        points = self._undominated(room, time)
        is_own = points < count
        entries = np.empty_like(points)
        lines, places = np.divmod(points[is_own], len(rest.rooms))
        entries[is_own] = self._logged(node.options, lines, rest.entries[places])
        if others:
            known = np.concatenate([one.entries for one in others])
            entries[~is_own] = known[points[~is_own] - count]
        return _Rest(room[points], time[points], entries)

    def _along(self, node: Node, rest: _Rest) -> _Rest:
        """The front of the children of a node, with all that follows them."""
        # From each place on, the fronts of the children and of the stretches that begin there.
        count = len(node.children)
        fronts = [rest] * (count + 1)
        for place in reversed(range(count)):
            ways = [(place + 1, node.children[place])]
            ways += [(end, one) for begin, end, one in node.stretches if begin == place]
            fronts[place] = self._united([self._ahead(one, fronts[end]) for end, one in ways])
        return fronts[0]

    def _united(self, ways: Sequence[_Rest]) -> _Rest:
        """The front of several fronts."""
        if len(ways) == 1:
            return ways[0]
        room = np.concatenate([one.rooms for one in ways])
        time = np.concatenate([one.times for one in ways])
        points = self._undominated(room, time)
        entries = np.concatenate([one.entries for one in ways])
        return _Rest(room[points], time[points], entries[points])

    def _around(self, option: OuterOption, rest: _Rest) -> _Rest:
        """The front of an option around a division, with all that follows it."""
        inside = self._alone.get(id(option.inside))
        if inside is None:
            inside = self._alone[id(option.inside)] = self._ahead(option.inside, self._end)
        peaks = np.maximum(inside.rooms + option.beside_bytes, option.peak_bytes)
        rooms = rest.rooms + option.kept_bytes
        # The step needs the larger of the two. So in each room, both run as fast as they can in it.
        room = np.concatenate([peaks, rooms])
        within = np.searchsorted(peaks, room, "right") - 1
        after = np.searchsorted(rooms, room, "right") - 1
        fits = (within >= 0) & (after >= 0)
        room, within, after = room[fits], within[fits], after[fits]
        time = inside.times[within] + rest.times[after] + option.time_ns
        points = self._undominated(room, time)
        options = [option] * len(peaks)
        entries = self._logged(
            options, within[points], rest.entries[after[points]], inside.entries.tolist()
        )
        return _Rest(room[points], time[points], entries)

    def _logged(
        self,
        options: Sequence[Option | OuterOption],
        lines: Integers,
        following: Integers,
        insides: Sequence[int] | None = None,
    ) -> Integers:
        """Add entries to the log: some of these options, each followed by an entry of the rest."""
        self._log.append(((lines + len(self._options)).astype(np.int32), following))
        self._options.extend(options)
        self._insides.extend(insides or [0] * len(options))
        self._entries += len(lines)
        return np.arange(self._entries - len(lines), self._entries)

    def _undominated(self, rooms: Integers, times: Integers) -> Integers:
        """Indices of undominated points: the fastest between every two multiples of the resolution.

        A dominated point can be dropped: whatever modules are put before it, the point that
        dominates it is still better.
        """
        # A stable sort keeps the first of equal points. It is fast, because it merges sorted runs.
        order = np.argsort(rooms, kind="stable")
        lowest = np.minimum.accumulate(times[order])
        points = order[np.append(True, lowest[1:] < lowest[:-1])]
        ascending = rooms[points]
        multiples = ascending // self._resolution
        # Times fall, so the last point of each multiple of the resolution is the fastest.
        kept = np.append(multiples[1:] != multiples[:-1], True)
        # Of the points that need the least memory, the fastest is kept, too, so that the smallest
        # peak is exact.
        kept[np.searchsorted(ascending, ascending[0], "right") - 1] = True
        left: Integers = points[kept]
        return left


def _most(node: Node, known: dict[int, int]) -> int:
    """An upper bound of all sums of bytes and all sums of times in a step."""
    if id(node) not in known:
        own: list[Option | OuterOption] = [*node.options, *node.outer]
        inside = [*node.children, *(one.inside for one in node.outer)]
        inside += [one for _, _, one in node.stretches]
        known[id(node)] = (
            sum(abs(one.kept_bytes) + one.peak_bytes + one.time_ns for one in own)
            + sum(one.beside_bytes for one in node.outer)
            + sum(_most(one, known) for one in inside)
        )
    return known[id(node)]
