"""Take nested arguments and results apart, and put them together again.

torch's pytree takes lists, tuples, dicts and registered classes apart. Here dataclasses are taken
apart, too, because models use them for arguments and results.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ucudnn.execution.compiling import untraced
from ucudnn.segment import length


@dataclass(frozen=True, slots=True)
class Nest:
    """How values are nested; two are equal if the same kinds of containers hold as many values.

    Args:
        spec: the containers that torch knows.
        inner: for each value in these, None; or the dataclass that it is, and the nest of its
            fields.
    """

    spec: TreeSpec
    inner: tuple[_Fields | None, ...]


@dataclass(frozen=True, slots=True)
class _Fields:
    kind: type
    nest: Nest
    empty: Any = field(compare=False)


@untraced
def take_apart(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Nest]:
    """The values in nested containers and dataclasses, and how they were nested.

    >>> take_apart(({"a": 1}, [2, 3]))[0]
    [1, 2, 3]

    Args:
        tree: the nested containers.
        is_leaf: True for a container that is not taken apart.
    """
    leaves, inner = list[Any](), list[_Fields | None]()
    outer, spec = tree_flatten(tree, is_leaf)
    for one in outer:
        if is_dataclass(one) and not isinstance(one, type) and not (is_leaf and is_leaf(one)):
            found, nest = take_apart([getattr(one, name) for name in _names(one)], is_leaf)
            leaves += found
            inner.append(_Fields(type(one), nest, _emptied(one)))
        else:
            leaves.append(one)
            inner.append(None)
    return leaves, Nest(spec, tuple(inner))


@untraced
def put_together(leaves: Sequence[Any], nest: Nest) -> Any:
    """The nested containers that `take_apart` took apart, with other values.

    >>> leaves, nest = take_apart(({"a": 1}, [2]))
    >>> put_together([5, 6], nest)
    ({'a': 5}, [6])
    """
    return _put_together(iter(leaves), nest)


def _put_together(leaves: Iterator[Any], nest: Nest) -> Any:
    found = []
    for one in nest.inner:
        if one is None:
            found.append(next(leaves))
            continue
        # The values are set in a copy, because the class's own `__init__` may compute something.
        twin = copy.copy(one.empty)
        values = _put_together(leaves, one.nest)
        for name, value in zip(_names(twin), values, strict=True):
            object.__setattr__(twin, name, value)
        found.append(twin)
    return tree_unflatten(found, nest.spec)


def _emptied(one: Any) -> Any:
    """A copy of a dataclass without the values of its fields, which would be kept alive."""
    twin = copy.copy(one)
    for name in _names(one):
        object.__setattr__(twin, name, None)
    return twin


def lists_in(tree: Any, count: int, place: str = "") -> Iterator[tuple[str, Any]]:
    """The lists and tuples inside nested containers that have `count` entries, and where they are.

    >>> [*lists_in(((1, [2, 3]), {"a": {"b": (4, 5)}}), 2)]
    [('1', [2, 3]), ('a.b', (4, 5))]

    Args:
        tree: the arguments of a module, as (args, kwargs); these two are not among what is found.
        count: the number of entries.
        place: where in the arguments a part of them is; "" for all of them.
    """
    if not place:
        branches = [*enumerate(tree[0]), *tree[1].items()]
    elif isinstance(tree, dict):
        branches = [*tree.items()]
    elif isinstance(tree, (list, tuple)):
        branches = [*enumerate(tree)]
    elif is_dataclass(tree) and not isinstance(tree, type):
        branches = [(name, getattr(tree, name)) for name in _names(tree)]
    else:
        branches = []
    for name, one in branches:
        here = f"{place}.{name}" if place else str(name)
        is_list = isinstance(one, (list, tuple, np.ndarray)) and not hasattr(one, "_fields")
        if is_list and not isinstance(one, torch.Size) and length(one) == count:
            yield here, one
        yield from lists_in(one, count, here)


def _names(one: Any) -> list[str]:
    return [each.name for each in fields(one) if hasattr(one, each.name)]
