"""Segments: modules that run in micro-batches or slabs, and the micro-batches of a loop."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from ucudnn.errors import ConfigError, PlanError, quoted
from ucudnn.units import Count, Positive

# How a plan has a model compiled: by torch.compile as a whole, with this share of the activations
# kept for backward (torch's `activation_memory_budget`); or not at all, even if its user compiles.
UNCOMPILED: Literal["no"] = "no"
Compiled = Annotated[float, Meta(ge=0, le=1)] | Literal["no"]


class SlabRows(NamedTuple):
    """Rows of one slab, counted in the first argument that is cut.

    Attributes:
        first: the first row that belongs to the slab.
        last: the row after the last one that belongs to it.
        low: the first row that is read, with the halo.
        high: the row after the last one that is read.
        is_last: True: no slab follows.
    """

    first: int
    last: int
    low: int
    high: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """A module that runs in parts or is recomputed, and what it keeps for its backward.

    Its parts are micro-batches, slabs of rows, or slabs of micro-batches.

    >>> print(Segment("layers.0", 4))
    layers.0 in micro-batches of 4, recomputed
    >>> print(Segment("layers.0", 4, kept=1))
    layers.0 in micro-batches of 4, recomputed but for the last
    >>> print(Segment("layers.0", None, recompute=False, selective=True))
    layers.0 whole, selectively recomputed
    >>> print(Segment("layers.0", rows=64, halo=(4, 4)))
    layers.0 in slabs of 64 rows, recomputed

    Args:
        module: the name of the module in the model; "" is the model itself. "layers[2:5]" is a
            stretch: the children 2, 3 and 4 of the `nn.Sequential` that is called "layers".
        micro_batch: the most samples that it runs at once; None: all samples.
        recompute: keep only its inputs, and compute each micro-batch again in backward.
        offload: move the tensors that backward needs from the GPU to the host until backward.
        shared: tensors that are never cut, because all samples share them, such as a mask; given
            by their indices in the flattened list of the module's (nested) arguments. The first of
            the other tensors has as many rows as there are samples; each one of this length is cut.
        training: the modes in which the module runs as this segment says: for each, the names of
            those modules, this one ("") and those inside it, that are in training mode, and of
            their own attributes that are True. In another mode it runs as torch runs it. None: it
            runs so in every mode.
        kept: number of parts that are not recomputed, but keep all that backward needs; these are
            the ones that run last, because backward begins with them.
        selective: compute only the results of normalisations and activation functions again in
            backward, each when it is needed (selective recomputation). With `recompute`, this is
            done in the recomputed forward, so that less is allocated beside it.
        lists: for each list or tuple in the module's arguments that had as many entries as there
            were samples: where it is, and whether it is cut with the samples. None: each one of
            this length is cut.
        inference: further modes, in which it runs in micro-batches where gradients are disabled.
        least: the least samples of a micro-batch, where there are as many. A last micro-batch of
            fewer samples is joined to the one before.
        rows: the most rows of a slab; None: all rows at once. A row is one index of `axis`, such as
            a row of an image, a plane of a volume, or a token of a sequence. Rows are counted in
            the first argument that has any.
        axis: the axis of the arguments and results that has the rows.
        halo: the rows before and after a slab that the results of its own rows depend on. They are
            computed, too, and what they give is cut away.
        unit: slabs begin at multiples of this; larger than 1 for modules with strides.
        rates: of each tensor among the flattened arguments, the rows that belong to `unit` rows of
            the first one that has any; 0 for what is not cut; then the same of each result. None:
            in proportion to their lengths.
        norms: for each normalisation over rows, in the order of their calls, the rows of its input
            that belong to a unit. Its statistics are computed first, slab by slab.

    Raises:
        PlanError: `micro_batch` or `rows` is neither None nor an int of at least 1, `axis` or
            `halo` are no axis and halo, `recompute` and `offload` are both true, or `kept` is given
            without parts that are recomputed.
    """

    module: str
    micro_batch: int | None = None
    recompute: bool = True
    offload: bool = False
    shared: tuple[Count, ...] = ()
    training: tuple[tuple[str, ...], ...] | None = None
    kept: Count = 0
    selective: bool = False
    lists: tuple[tuple[str, bool], ...] | None = None
    inference: tuple[tuple[str, ...], ...] = ()
    least: Positive = 1
    rows: int | None = None
    axis: Positive = 2
    halo: tuple[Count, Count] = (0, 0)
    unit: Positive = 1
    rates: tuple[tuple[Count, ...], tuple[Count, ...]] | None = None
    norms: tuple[Positive, ...] = ()

    def __post_init__(self) -> None:
        size = self.micro_batch
        if size is not None and not is_size(size):
            raise PlanError(
                f"micro_batch of segment {self.module!r} must be an int of at least 1, or None for "
                f"all samples, got {quoted(size)}"
            )
        if self.rows is not None and not is_size(self.rows):
            raise PlanError(
                f"rows of segment {self.module!r} must be an int of at least 1, or None for all "
                f"rows at once, got {quoted(self.rows)}"
            )
        counts = self.halo if type(self.halo) is tuple else ()
        if len(counts) != 2 or any(type(one) is not int or one < 0 for one in counts):
            raise PlanError(
                f"halo of segment {self.module!r} must be a tuple of two ints of at least 0, the "
                f"rows before and after a slab, got {quoted(self.halo)}"
            )
        for name, value in (("axis", self.axis), ("unit", self.unit)):
            if not is_size(value):
                raise PlanError(
                    f"{name} of segment {self.module!r} must be an int of at least 1, got "
                    f"{quoted(value)}"
                )
        if self.recompute and self.offload:
            raise PlanError(
                f"segment {self.module!r} recomputes, which leaves nothing to offload; choose one"
            )
        if type(self.kept) is not int or self.kept < 0:
            raise PlanError(
                f"kept of segment {self.module!r} must be an int of at least 0, got "
                f"{quoted(self.kept)}"
            )
        if self.kept and not (self.is_cut and self.recompute):
            raise PlanError(
                f"segment {self.module!r} keeps {self.kept} parts, and has none that are "
                f"recomputed; leave out kept"
            )

    def __str__(self) -> str:
        name = self.module or "the model"
        return f"{name} {self.manner}"

    def sizes(self, count: int) -> list[int]:
        """Samples of each micro-batch of a batch.

        >>> Segment("", 2).sizes(5), Segment("", 2, least=2).sizes(5), Segment("", None).sizes(5)
        ([2, 2, 1], [2, 3], [5])
        """
        size = count if self.micro_batch is None else max(self.micro_batch, self.least)
        if count <= size:
            return [count]
        sizes = [size] * (count // size)
        if rest := count % size:
            sizes.append(rest) if rest >= self.least else sizes.append(sizes.pop() + rest)
        return sizes

    def slabs(self, count: int) -> list[SlabRows]:
        """The slabs of so many rows.

        >>> [one[:4] for one in Segment("", rows=4, halo=(1, 2)).slabs(9)]
        [(0, 4, 0, 6), (4, 8, 3, 9), (8, 9, 5, 9)]
        >>> [one[:2] for one in Segment("", rows=5, unit=2).slabs(9)]
        [(0, 4), (4, 9)]
        """
        unit, (before, after) = self.unit, (-(-one // self.unit) * self.unit for one in self.halo)
        size = max(unit, (self.rows or count) // unit * unit)
        # Fewer rows than a unit may have no result of their own, and fewer than those that one
        # result depends on may be too few for the module.
        least, found = before + unit + after, list[SlabRows]()
        firsts = [*range(0, count - unit + 1, size)] or [0]
        for first, last in zip(firsts, [*firsts[1:], count], strict=True):
            low = max(0, min(first - before, (count - least) // unit * unit))
            high = min(count, max(last + after, low + least))
            found.append(SlabRows(first, last, low, high, last == count))
        return found

    @property
    def is_cut(self) -> bool:
        """True if the module runs in parts."""
        return self.micro_batch is not None or self.rows is not None

    @property
    def manner(self) -> str:
        """How the module runs, in words."""
        size, rows = self.micro_batch, self.rows
        ways = [f"in micro-batches of {size}"] * (size is not None)
        ways += [f"in slabs of {rows} rows"] * (rows is not None)
        how = ", ".join(ways) or "whole"
        if self.recompute:
            last = "the last" if self.kept == 1 else f"the last {self.kept}"
            how += f", recomputed{f' but for {last}' if self.kept else ''}"
        how += ", offloaded" if self.offload else ""
        return how + (", selectively recomputed" if self.selective else "")


class Stretch(NamedTuple):
    """Neighbours in a sequence that are a segment together.

    >>> str(Stretch("layers", 2, 5))
    'layers[2:5]'

    Attributes:
        module: the name of the sequence.
        begin: the place of the first child in it, counted from 0.
        end: the place after the last child.
    """

    module: str
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.module}[{self.begin}:{self.end}]"

    def holds(self, other: Stretch) -> bool:
        """True if each child of another stretch is one of this stretch."""
        is_within = self.begin <= other.begin and other.end <= self.end
        return self.module == other.module and is_within

    def shares(self, other: Stretch) -> bool:
        """True if a child of another stretch is one of this stretch."""
        is_apart = self.end <= other.begin or other.end <= self.begin
        return self.module == other.module and not is_apart


@lru_cache(1 << 14)
def stretch_of(name: str) -> Stretch | None:
    """The stretch that a name stands for; None for the name of a module.

    >>> stretch_of("layers[2:5]")
    Stretch(module='layers', begin=2, end=5)
    >>> stretch_of("[0:3]"), stretch_of("layers.2")
    (Stretch(module='', begin=0, end=3), None)
    """
    found = re.fullmatch(r"(.*)\[(0|[1-9]\d*):([1-9]\d*)\]", name, re.ASCII | re.DOTALL)
    if found is None or int(found[2]) >= int(found[3]):
        return None
    return Stretch(found[1], int(found[2]), int(found[3]))


@lru_cache(1 << 16)
def is_inside(name: str, other: str) -> bool:
    """True if a module or stretch is inside another one.

    >>> is_inside("layers.2.conv", "layers[1:3]"), is_inside("layers[1:3]", "layers")
    (True, True)
    >>> is_inside("layers[1:3]", "layers[0:3]"), is_inside("layers.3", "layers[1:3]")
    (True, False)
    """
    if name == other:
        return False
    inner, outer = stretch_of(name), stretch_of(other)
    if outer is None:
        return other == "" or name.startswith((f"{other}.", f"{other}["))
    if inner is not None and inner.module == outer.module:
        return outer.holds(inner)
    prefix = f"{outer.module}." if outer.module else ""
    child = name.removeprefix(prefix).partition(".")[0].partition("[")[0]
    # The places of children with other names are not known here.
    is_child = not child.isdigit() or outer.begin <= int(child) < outer.end
    return name.startswith(prefix) and is_child


def compiled_as_told(compiled: Compiled) -> str:
    """How a plan has a model compiled, in words.

    >>> compiled_as_told(1.0), compiled_as_told(0.5), compiled_as_told(UNCOMPILED)
    ('compiled', 'compiled, keeping 50 % of the activations', 'not compiled')
    """
    if compiled == UNCOMPILED:
        return "not compiled"
    return "compiled" + (
        f", keeping {compiled:.0%} of the activations".replace("%", " %") if compiled < 1 else ""
    )


def is_size(value: object) -> bool:
    """True if a value may be the number of samples of a micro-batch: an int of at least 1."""
    return type(value) is int and value >= 1


class StepDivision(NamedTuple):
    """How a step is divided: into segments, by the micro-batches of a training loop, or both.

    Attributes:
        segments: modules that run in micro-batches or are recomputed.
        micro_batch: samples that a training loop runs at once; it adds up the gradients of all
            micro-batches. None: the whole batch.
        compiled: how the model is compiled; None: as it is, compiled or not.
    """

    segments: tuple[Segment, ...] = ()
    micro_batch: int | None = None
    compiled: Compiled | None = None

    @property
    def is_whole(self) -> bool:
        """True if the step is not divided."""
        return not self.segments and self.micro_batch is None


# The division of a step that is not divided.
WHOLE = StepDivision()


class MicroBatch(tuple[Any, ...]):  # noqa: SLOT001 - a tuple with slots has no room for a weight
    """A part of a batch, with a weight for its loss.

    Attributes:
        weight: number of samples of this part divided by that of the batch. The means over all
            parts, each times the weight of its part, add up to the mean over the batch.
    """

    weight: float


def micro_batches(size: int | None, batch: tuple[Any, ...]) -> Iterator[MicroBatch]:
    """Cut a batch along the first axis of its tensors.

    >>> [(*part, part.weight) for part in micro_batches(2, ([1, 2, 3], "abc"))]
    [([1, 2], 'ab', 0.6666666666666666), ([3], 'c', 0.3333333333333333)]

    Args:
        size: number of samples of a part; the last part may be smaller. None: one part with the
            whole batch.
        batch: tensors, arrays, lists of samples, and tuples and mappings of these.

    Raises:
        ConfigError: the batch is empty, or its tensors differ in their number of samples.
    """
    lengths = set(map(length, _leaves(batch)))
    if len(lengths) != 1 or 0 in lengths:
        raise ConfigError(
            f"a batch must have the same number of samples, at least 1, in everything that is "
            f"given to micro_batches, got {sorted(lengths)}"
        )
    count = lengths.pop()
    size = size or count
    for start in range(0, count, size):
        part = MicroBatch(_cut(one, slice(start, start + size)) for one in batch)
        part.weight = min(size, count - start) / count
        yield part


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, Mapping)):
        for branch in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _leaves(branch)
    else:
        yield tree


def length(one: Any) -> int:
    """The length of something; 0 if it has none."""
    try:
        return len(one)
    except TypeError:  # a number, or a tensor or an array without axes
        return 0


def _cut(tree: Any, where: slice) -> Any:
    if isinstance(tree, Mapping):
        return {name: _cut(branch, where) for name, branch in tree.items()}
    if isinstance(tree, tuple):
        # A named tuple keeps its type.
        return getattr(tree, "_make", tuple)(_cut(one, where) for one in tree)
    return tree[where]
