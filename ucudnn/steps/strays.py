"""Fake tensors that a traced model stored outside of itself: in globals, classes and caches.

A trace runs a copy of the model on fake tensors. Fake tensors that are stored in the copy are freed
together with the copy. Fake tensors that the model's code stores elsewhere would make the next real
step of the model fail, so they are removed after the trace.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple
from weakref import ReferenceType

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ucudnn.errors import ConfigError

# The type of functions with `functools.lru_cache`, which functools does not export.
_LRU_CACHE: type = type(lru_cache(int))
# To find out whether a value leads to a tensor, for example through containers and a function's
# cache, chains of at most this many references are followed.
_DEPTH = 5
_CONTAINERS = (dict, list, set, deque)
Watched = list[ReferenceType[Tensor]]


@contextmanager
def without_strays(model: nn.Module) -> Iterator[Watched]:
    """When the context ends, remove fake tensors that are still alive from all that holds them.

    The context yields a list, to which the caller must add a weak reference to every fake tensor. A
    name that holds one, in a class of the model or in the Python module of such a class, gets back
    its earlier value. Gradients are dropped, and caches of functions are cleared. If any other
    container holds a fake tensor, the tensor is removed, and an error describes the container.
    """
    names = [*_names_of(model)]
    watched: Watched = []
    try:
        yield watched
    # After an error in the trace, fake tensors are removed, but the containers that held them are
    # not reported: the error itself refers to tensors of the calls that raised it.
    except BaseException:
        _remove_all(watched, names, model)
        raise
    found = _remove_all(watched, names, model)
    if found:
        kept = (
            f"forward keeps tensors where a trace cannot put back what was there "
            f"({', '.join(found)}); they were removed"
        )
        # The cause is an error as torch's own of fake tensors: a step may still run on real ones.
        raise ConfigError(f"{kept}; use real=True") from RuntimeError(kept)


def _remove_all(watched: Watched, names: Iterable[_Names], model: nn.Module) -> list[str]:
    """Remove fake tensors that are alive; return descriptions of unexpected containers of them."""
    if not _alive(watched):
        return []
    # First, tensors that only a cycle of references keeps alive are freed: the model has not stored
    # them. Mostly they are young, and young objects are looked through quickly.
    for generation in (0, 2):
        gc.collect(generation)
        if not _alive(watched):
            return []
    _drop_gradients(model, _ids(watched))
    for one in names:
        one.put_back(_ids(watched))
    caches: list[Any] = [one for one in gc.get_objects() if type(one) is _LRU_CACHE]
    for cache in caches:
        if _leads_to(cache, _ids(watched)):
            cache.cache_clear()
    return _take_out(_alive(watched))


def _alive(watched: Watched) -> list[Tensor]:
    return [tensor for one in watched if (tensor := one()) is not None]


def _ids(watched: Watched) -> set[int]:
    return set(map(id, _alive(watched)))


def _drop_gradients(model: nn.Module, strays: set[int]) -> None:
    """Remove strays (fake tensors that outlived the trace) that are the `grad` of some tensor."""
    # The model's parameters are listed in addition to the objects that `gc` tracks, because `gc`
    # does not find parameters of TorchScript modules.
    for one in chain(model.parameters(), gc.get_objects()):
        # `issubclass` is used, because `isinstance` would read the attribute `__class__`, which
        # lazy proxies among these objects may implement.
        if not issubclass(type(one), Tensor):
            continue
        # torch raises an error for one of several views if another has been written to since.
        with suppress(RuntimeError):
            if one.is_leaf and id(one.grad) in strays:
                one.grad = None


class _Names(NamedTuple):
    """Names in a Python module or class, or in a dict there: values now and before the trace."""

    now: Mapping[Any, Any]
    before: Mapping[Any, Any]
    write: Callable[[Any, Any], object]
    delete: Callable[[Any], object]

    def put_back(self, strays: set[int]) -> None:
        for name, value in [*self.now.items()]:
            if not _leads_to(value, strays):
                continue
            if name not in self.before:
                self.delete(name)
            elif self.before[name] is not value:
                self.write(name, self.before[name])
            elif isinstance(value, (list, set, deque)):
                _keep(value, lambda one: not _leads_to(one, strays))


def _names_of(model: nn.Module) -> Iterator[_Names]:
    """Names in the classes of a model's modules, in their Python modules, and in dicts there."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    own = [cls for cls in classes if cls.__module__.partition(".")[0] not in ("builtins", "torch")]
    modules = [sys.modules[name] for name in {cls.__module__ for cls in own} if name in sys.modules]
    for holder in (*own, *modules):
        names = vars(holder)
        yield _Names(names, dict(names), partial(setattr, holder), partial(delattr, holder))
        for value in names.values():
            if type(value) is dict and value is not names:
                yield _Names(value, dict(value), value.__setitem__, value.__delitem__)


def _leads_to(value: object, strays: set[int]) -> bool:
    """True if a value is a stray, or leads to one through containers or a function's cache."""
    level: list[Any] = [value]
    for _ in range(_DEPTH + 1):
        if not strays.isdisjoint(map(id, level)):
            return True
        level = [
            one
            for one in gc.get_referents(*[one for one in level if _is_followed(one)])
            if isinstance(one, FakeTensor) or _is_followed(one)
        ]
    return False


def _is_followed(value: object) -> bool:
    is_container = isinstance(value, (*_CONTAINERS, tuple))
    return is_container or type(value).__name__ in ("_lru_cache_wrapper", "_lru_list_elem")


def _take_out(strays: list[Tensor]) -> list[str]:
    """Remove tensors, and tuples that hold them, from containers; describe the containers."""
    found: list[str] = []
    doomed: list[Any] = [*strays]
    strays.clear()
    while doomed:
        ids, tuples = set(map(id, doomed)), []
        for holder in gc.get_referrers(*doomed):
            if isinstance(holder, tuple):
                tuples.append(holder)
            elif isinstance(holder, _CONTAINERS) and holder is not doomed:
                found.append(f"a {type(holder).__name__} of {len(holder)}")
                _remove(holder, ids)
        # A tuple cannot be changed. So in the next round the tuple itself is removed from whatever
        # holds it.
        doomed = tuples
    return found


def _remove(holder: Any, ids: set[int]) -> None:
    if isinstance(holder, dict):
        for key in [key for key, value in holder.items() if {id(key), id(value)} & ids]:
            dict.__delitem__(holder, key)
    else:
        _keep(holder, lambda one: id(one) not in ids)


def _keep(holder: Any, is_kept: Callable[[Any], bool]) -> None:
    kept = [one for one in holder if is_kept(one)]
    if len(kept) < len(holder):
        holder.clear()
        holder.update(kept) if isinstance(holder, set) else holder.extend(kept)
