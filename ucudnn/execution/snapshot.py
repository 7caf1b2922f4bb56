"""Python state that a model's forward can change: recorded, and restored after a trace.

Tracing runs the model's own code, mostly on fake tensors, and that code stores what it computes in
attributes, in containers and objects at any depth, in closures of hooks, in classes and in globals.
State that the run did not change is not touched. State that it changed is restored by the methods
of the built-in types, which also works for subclasses that refuse changes.
"""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from types import (
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ucudnn.errors import ConfigError

# OrderedDict stands before dict, its base: the first match decides whose methods are used, and
# those of dict would bypass the order that an OrderedDict keeps.
_CONTAINERS = (OrderedDict, dict, list, set, deque)
_TRANSPARENT = (
    *(*_CONTAINERS, tuple, frozenset, nn.Module, Tensor),
    *(FunctionType, MethodType, partial, CellType),
)
# Immutable and without references to other objects: nothing in them to record or to follow.
_ATOMS = (NoneType, bool, int, float, str, bytes)
# functools does not export the type of its C implementation.
_LRU_CACHE: type = type(lru_cache(int))
# From a cache to a tensor: by its dict, a link of its list, a tuple and containers in that.
_DEPTH_OF_CACHE = 5
# The package of torch.compile's front end, whose functions wrap all code that it compiles.
_COMPILER = "torch._dynamo"
# Unlike None it cannot be the value of an attribute that is there.
_MISSING = object()


@contextmanager
def unchanged(model: nn.Module, fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """Restore all Python state that forward changes within the context, however it ends.

    Args:
        model: the model whose forward is run.
        fake_mode: the mode of the fake tensors; None if the tensors are real. Real tensors stay in
            containers that only globals refer to, as after any other step.

    Raises:
        ConfigError: forward stored a fake tensor where it was not expected; it was removed.
    """
    snapshot = _Snapshot(model)
    try:
        # Inside the try: an interrupt between two gradients must still put the first back.
        snapshot.take_gradients_off()
        yield
    finally:
        try:
            snapshot.put_back()
        except KeyboardInterrupt:  # it may have come between emptying a container and filling it
            snapshot.put_back()
            raise
        # After everything known was put back, the fake tensors that are still alive are those that
        # were stored where the snapshot did not look.
        strays = [] if fake_mode is None else _remove(fake_mode)
    # Raised only where the traced code raised nothing, so its own error is never hidden.
    if strays:
        raise ConfigError(
            f"forward keeps tensors where tracing cannot put back what was there "
            f"({', '.join(strays)}); they were removed again; use real=True"
        )


class _Contents(NamedTuple):
    """Contents of a container.

    Args:
        container: an OrderedDict, dict, list, set or deque.
        base: its built-in type, whose methods are used even if a subclass overrides them.
        items: the items in order; (key, value) for a dict.
    """

    container: Any
    base: Any
    items: list[Any]

    @classmethod
    def of(cls, container: object) -> _Contents | None:
        """The contents of a container; None for other objects."""
        # `issubclass(type())`, not `isinstance`, which runs the object's own `__class__`.
        base: Any = next((base for base in _CONTAINERS if issubclass(type(container), base)), None)
        if base is None:
            return None
        is_dict = issubclass(base, dict)
        items = base.items(container) if is_dict else base.__iter__(container)
        return cls(container, base, list(items))

    @property
    def values(self) -> list[Any]:
        """All values in the container, without keys."""
        return [value for _, value in self.items] if issubclass(self.base, dict) else self.items

    def now(self) -> _Contents:
        """Present contents of the same container."""
        contents = _Contents.of(self.container)
        assert contents is not None
        return contents

    def put_back(self) -> None:
        """Restore these contents if the container has others."""
        if self.now()._identities() != self._identities():
            self.write(self.items)

    # By identity, because `==` of tensors is elementwise and that of user objects runs their code.
    def _identities(self) -> Any:
        if issubclass(self.base, dict):
            return [(id(key), id(value)) for key, value in self.items]
        return (set if self.base is set else list)(map(id, self.items))

    def write(self, items: list[Any]) -> None:
        """Give the container other contents."""
        self.base.clear(self.container)
        if issubclass(self.base, dict):
            for key, value in items:
                self.base.__setitem__(self.container, key, value)
        elif self.base is set:
            set.update(self.container, items)
        else:
            self.base.extend(self.container, items)


class _Attribute(NamedTuple):
    """A reference held by a slot, by a variable of a closure or by a tensor's `.grad`."""

    holder: Any
    name: str
    value: Any

    @classmethod
    def of(cls, holder: object, name: str) -> _Attribute:
        """An attribute as it is, or `_MISSING`."""
        try:
            # object's own method runs no `__getattr__` or `__getattribute__` that a class defines.
            return cls(holder, name, object.__getattribute__(holder, name))
        except (AttributeError, ValueError):  # an empty cell raises the latter
            return cls(holder, name, _MISSING)

    @property
    def values(self) -> list[Any]:
        """The value, if there is one."""
        return [] if self.value is _MISSING else [self.value]

    def now(self) -> _Attribute:
        """The same attribute as it is now."""
        return _Attribute.of(self.holder, self.name)

    def put_back(self) -> None:
        """Restore this value if the attribute has another."""
        if self.now().value is self.value:
            return
        if self.value is _MISSING:
            object.__delattr__(self.holder, self.name)
        else:
            object.__setattr__(self.holder, self.name, self.value)


class _Names(NamedTuple):
    """Attributes of a class or globals of a module, which code outside the model also uses."""

    names: Any
    before: dict[str, Any]
    assign: Callable[[str, Any], None]
    delete: Callable[[str], None]

    def put_back(self, is_stray: Callable[[Iterable[object]], bool]) -> None:
        """Restore the names that now refer to fake tensors."""
        for name, value in list(self.names.items()):
            before = self.before.get(name, _MISSING)
            if value is before or not is_stray([value]):
                continue
            if before is _MISSING:
                self.delete(name)
            else:
                self.assign(name, before)


class _Snapshot:
    """Everything that a model's forward could change.

    Attributes, containers and closures that the model refers to belong to it and are all restored.
    State that its code reaches through classes and globals is shared, for example with caches of
    libraries. It is restored only where a fake tensor was stored.
    """

    def __init__(self, model: nn.Module) -> None:
        # Holds the objects themselves, so that Python gives none of these ids to a new one.
        self._seen: dict[int, object] = {}
        self._own: list[_Contents | _Attribute] = []
        self._shared: list[_Contents | _Attribute] = []
        self._gradients: list[_Attribute] = []
        self._functions: list[FunctionType] = []
        self._names: list[_Names] = []
        # The model first: an object goes to the list of the first root that leads to it, and what
        # the model leads to counts as its own even where globals lead to it, too.
        self._record([model], self._own)
        classes = {cls for module in model.modules() for cls in type(module).__mro__}
        for cls in classes:
            if not _is_foreign(cls):
                self._record_class(cls)
        self._record_globals()

    def take_gradients_off(self) -> None:
        """Set all gradients to None, so that backward adds to none of those recorded."""
        for gradient in self._gradients:
            # Backward accumulates into an existing gradient in place, which could not be undone.
            gradient.holder.grad = None

    def put_back(self) -> None:
        """Restore everything that has changed since the snapshot; a second call does nothing."""
        for gradient in self._gradients:
            gradient.put_back()
        for record in self._own:
            record.put_back()
        for names in self._names:
            names.put_back(self._has_strays)
        for record in self._shared:
            if self._has_strays(record.now().values):
                record.put_back()

    def _has_strays(self, values: Iterable[object]) -> bool:
        """True if a fake tensor can be reached from values that the snapshot has not seen."""
        # What was there before is not followed: its changes are in records of their own.
        met: dict[int, object] = {}
        pending = list(values)
        while pending:
            one = pending.pop()
            if issubclass(type(one), FakeTensor):
                return True
            if type(one) not in _ATOMS and id(one) not in self._seen and id(one) not in met:
                met[id(one)] = one
                pending += [value for record in _records_of(one) for value in record.values]
                pending += _others_in(one)
        return False

    def _record(self, roots: Iterable[object], records: list[_Contents | _Attribute]) -> None:
        pending = list(roots)
        while pending:
            one = pending.pop()
            if type(one) in _ATOMS or id(one) in self._seen:
                continue
            self._seen[id(one)] = one
            # Backward gives a `.grad` to leaves only, and reading that of other tensors warns.
            if isinstance(one, Tensor) and one.is_leaf and one.requires_grad:
                self._gradients.append(_Attribute(one, "grad", one.grad))
            if type(one) is FunctionType and not _is_compilers(one):
                self._functions.append(one)
            for record in _records_of(one):
                records.append(record)
                pending += record.values
            pending += _others_in(one)

    def _record_class(self, cls: type) -> None:
        names = vars(cls)
        # The names of a class cannot be written through `vars`; type's own methods ignore a
        # metaclass that forbids it.
        assign, delete = partial(type.__setattr__, cls), partial(type.__delattr__, cls)
        self._names.append(_Names(names, dict(names), assign, delete))
        self._record(map(_function_of, names.values()), self._shared)

    def _record_globals(self) -> None:
        """Record the globals that the model's functions name, except functions among these."""
        namespaces: dict[int, dict[str, Any]] = {}
        named: dict[int, object] = {}
        for function in self._functions:
            namespace = namespaces.setdefault(id(function.__globals__), function.__globals__)
            values = [namespace.get(name) for name in _names_in(function.__code__)]
            # Functions are left out: following their globals would lead through whole libraries.
            named |= {id(value): value for value in values if type(value) is not FunctionType}
        for namespace in namespaces.values():
            assign, delete = namespace.__setitem__, namespace.__delitem__
            self._names.append(_Names(namespace, dict(namespace), assign, delete))
        for value in named.values():
            if isinstance(value, type) and not _is_foreign(value):
                self._record_class(value)
        self._record(named.values(), self._shared)


def _is_foreign(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("builtins", "torch")


def _names_in(code: CodeType) -> Iterator[str]:
    """The names, such as those of globals, that a function and its inner functions use."""
    # Nested functions, lambdas and comprehensions are code objects among the constants.
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _function_of(member: object) -> object:
    """The function of a method of any sort; other objects are returned as they are."""
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def _records_of(one: object) -> Iterator[_Contents | _Attribute]:
    """Mutable parts of one object: contents of a container, slots, a closure's variable."""
    if _is_opaque(type(one)) or _is_compilers(one):
        return
    contents = _Contents.of(one)
    if contents is not None:
        yield contents
    if type(one) is CellType:
        yield _Attribute.of(one, "cell_contents")
    # Slots are descriptors on the class that declares them and are not in the object's `__dict__`.
    for cls in type(one).__mro__:
        if "__slots__" in vars(cls):
            for name, member in vars(cls).items():
                if type(member) is MemberDescriptorType:
                    yield _Attribute.of(one, name)


def _others_in(one: object) -> list[Any]:
    """Other objects that an object refers to."""
    kind = type(one)
    if _is_opaque(kind) or _is_compilers(one):
        return []
    found: list[Any] = []
    if issubclass(kind, (tuple, frozenset)):
        found += one  # type: ignore[arg-type]
    elif isinstance(one, FunctionType):
        found += [one.__closure__, one.__defaults__, one.__kwdefaults__]
    elif isinstance(one, MethodType):
        found += [one.__self__, one.__func__]
    elif isinstance(one, partial):
        found += [one.func, one.args, one.keywords]
    with suppress(AttributeError):
        found.append(object.__getattribute__(one, "__dict__"))
    return found


def _is_compilers(one: object) -> bool:
    """True for objects and functions of torch.compile.

    They are not inspected: code that it compiled meanwhile stays valid, and leads to fake tensors.
    """
    kind = type(one)
    if isinstance(one, FunctionType):
        return str(one.__globals__.get("__name__")).startswith(_COMPILER)
    # An nn.Module of it is the wrapper of a model, which leads to the model.
    return str(kind.__module__).startswith(_COMPILER) and not issubclass(kind, nn.Module)


def _is_opaque(kind: type) -> bool:
    """True for types whose objects are not inspected, because they define how they are pickled.

    Most of these are never changed (enumerations), or are shared with other code (loggers).
    """
    # Classes and modules are recorded by name (`_Names`) and never followed as objects.
    if issubclass(kind, (type, ModuleType)):
        return True
    if issubclass(kind, _TRANSPARENT):
        return False
    reduce = (kind.__reduce__, kind.__reduce_ex__)
    return reduce != (object.__reduce__, object.__reduce_ex__)


def _remove(fake_mode: FakeTensorMode) -> list[str]:
    """Remove the fake tensors of a mode that are still alive from all objects that hold them.

    Returns:
        A description of each container that held one. Caches of functions are not reported:
        emptying a cache changes no result.
    """
    if not _alive(fake_mode):
        return []
    # Fake tensors in reference cycles are garbage, not stored by anybody.
    gc.collect()
    strays = _alive(fake_mode)
    caches: list[Any] = [one for one in gc.get_objects() if type(one) is _LRU_CACHE]
    # functools caches cannot be edited entry by entry, only emptied; a cache computes again.
    for cache in caches:
        if _leads_to(cache, set(map(id, strays))):
            cache.cache_clear()
    # This list itself refers to every stray tensor, and `_alive` must count only other holders.
    strays.clear()
    strays += _alive(fake_mode)
    return _take_out(strays) if strays else []


def _alive(fake_mode: FakeTensorMode) -> list[FakeTensor]:
    return [
        one
        for one in gc.get_objects()
        if type(one) is FakeTensor and getattr(one, "fake_mode", None) is fake_mode
    ]


def _leads_to(cache: object, strays: set[int]) -> bool:
    level = [cache]
    for _ in range(_DEPTH_OF_CACHE):
        level = [
            one
            for one in gc.get_referents(*level)
            if isinstance(one, (FakeTensor, dict, list, tuple)) or "lru_list" in type(one).__name__
        ]
        if not strays.isdisjoint(map(id, level)):
            return True
    return False


def _take_out(strays: list[FakeTensor]) -> list[str]:
    """Remove tensors, and tuples with them, from all containers; describe the containers."""
    found: list[str] = []
    doomed: list[Any] = strays
    while doomed:
        ids, tuples = set(map(id, doomed)), []
        for holder in gc.get_referrers(*doomed):
            contents = _Contents.of(holder)
            if isinstance(holder, tuple):
                tuples.append(holder)
            # `doomed` is this function's own list of what it removes.
            elif contents is not None and holder is not doomed:
                values = contents.values
                pairs = zip(contents.items, values, strict=True)
                contents.write([item for item, value in pairs if id(value) not in ids])
                found.append(f"a {type(holder).__name__} of {len(values)}")
        # A tuple cannot be changed, so whatever holds the tuple gives it up in the next round.
        doomed = tuples
    return found
