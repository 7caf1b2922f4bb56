"""What a module's forward reads beside its arguments, put back while that forward is repeated.

`torch.utils.checkpoint` repeats a forward with the same arguments, torch's random numbers and
autocast. Everything else may have changed since: parameters that `functional_call` has swapped, an
attribute that another module sets before each call, a global, the generators of Python and NumPy.
"""

from __future__ import annotations

import copy
import copyreg
import dis
import random
import sys
import sysconfig
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ucudnn.backends.tensors import PLAIN
from ucudnn.execution.compiling import untraced

# Values of these types are not changed, or hold nothing that a forward would read.
_LEAVES = {
    *(type(None), bool, int, float, complex, str, bytes, range, slice),
    *(BuiltinFunctionType, torch.dtype, torch.device, torch.Size, torch.Generator),
    *PLAIN,
}
# The first of these that a container is an instance of has the methods that change it.
_CONTAINERS = (OrderedDict, dict, list, set, deque)
# Of so many tensors, so many elements are compared before a forward is repeated.
_SAMPLES, _ELEMENTS = 64, 16
# Attributes that every module has; of these, a forward reads only tensors, modules and hooks.
OF_ANY_MODULE = vars(nn.Module()).keys()
_READ = {"_parameters", "_buffers", "_modules"}
_HOOKS = [one for one in OF_ANY_MODULE if one.endswith("_hooks") and "state_dict" not in one]
# Containers with more values, and larger arrays, are data rather than state. Objects are followed
# only so far: a module may refer to all of a program, for example to its trainer.
_MOST_VALUES, _MOST_BYTES, _DEEPEST = 1000, 1 << 16, 5
_LIBRARIES = {"torch", "numpy", "ucudnn", *sys.stdlib_module_names}
_LIBRARIES -= {"__main__", "argparse", "collections", "types"}
# Classes, functions and globals of installed packages are not followed, only those of the user.
_INSTALLED = tuple(
    {sysconfig.get_path(one) for one in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def holders(root: nn.Module, others: Sequence[Any] = ()) -> Iterator[Any]:
    """The dicts, lists, sets and variables that a forward of a module may read.

    These hold the attributes of the module and of those inside it, what these attributes refer to,
    and the variables that methods of these modules name.

    Args:
        root: the module.
        others: objects among its arguments.
    """
    seen: dict[int, Any] = {}
    stack: list[tuple[Any, int]] = [(one, 0) for one in (root, *others)]
    while stack:
        value, depth = stack.pop()
        if type(value) in _LEAVES or id(value) in seen:
            continue
        seen[id(value)] = value
        own, values = _opened(value)
        yield from own
        # The class of a module is as near as the module.
        depth = 0 if isinstance(value, nn.Module) else depth + 1
        if depth <= _DEEPEST:
            stack += [(one, depth) for one in values]


def _opened(value: Any) -> tuple[list[Any], Iterable[Any]]:
    """The holders that an object is or has, and the values to be opened next."""
    if isinstance(value, nn.Module):
        return _opened_module(value)
    if isinstance(value, type):
        return _opened_class(value)
    if isinstance(value, np.ndarray):
        return ([value] if value.nbytes <= _MOST_BYTES and not value.dtype.hasobject else []), ()
    own: list[Any] = []
    values: list[Any] = []
    if isinstance(value, _CONTAINERS):
        own, values = ([value], _values(value)) if len(value) <= _MOST_VALUES else ([], [])
    elif isinstance(value, tuple):
        values = [*value]
    elif isinstance(value, FunctionType):
        own = [*_outside(value)]
        values = [one for holder in own for one in _values(holder)]
    elif isinstance(value, (MethodType, partial)):
        is_method = isinstance(value, MethodType)
        names = ("__self__", "__func__") if is_method else ("func", "args", "keywords")
        values = [getattr(value, one) for one in names]
    attributes, slots = _attributes_of(value)
    own += [*attributes, *slots]
    values += [one for holder in (*attributes, *slots) for one in _values(holder)]
    # An object may refer to any module of a program, for example to the one around it.
    return own, [one for one in values if not isinstance(one, nn.Module)]


def _attributes_of(value: Any) -> tuple[list[Any], list[_Name]]:
    """The attributes of an object whose class is no library's."""
    kind: Any = type(value)
    if isinstance(value, (ModuleType, FunctionType, Tensor)) or not _is_followed(kind):
        return [], []
    attributes = [vars(value)] if hasattr(value, "__dict__") else []
    names = [one for one in _slots(kind) if hasattr(value, one)]
    return attributes, [_Name(value, one) for one in names]


@lru_cache(4096)
def _slots(kind: Any) -> tuple[str, ...]:
    return tuple(copyreg._slotnames(kind))  # type: ignore[attr-defined]


def _opened_module(module: nn.Module) -> tuple[list[Any], list[Any]]:
    kind: Any = type(module)
    own: list[Any] = [vars(module)]
    values: list[Any] = []
    for name, one in vars(module).items():
        if name in _READ:
            own.append(one)
            values += one.values()
        elif name not in OF_ANY_MODULE:
            values.append(one)
    return own, [*values, kind]


def _opened_class(kind: Any) -> tuple[list[Any], list[Any]]:
    """The attributes of a class, and the variables that its methods read."""
    own: list[Any] = [
        _Name(cls, name)
        for cls in kind.__mro__
        if _is_users(cls.__module__)
        for name in _class_names(cls)
    ]
    own += [one for function in _methods(kind) for one in _outside(function)]
    found = [one for holder in own for one in _values(holder)]
    return own, [one for one in found if not isinstance(one, nn.Module)]


class _State(NamedTuple):
    """How to read and to write the state of a generator of random numbers."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]


def _set_numpys(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


def _torchs(generator: torch.Generator) -> Any:
    # Where a step is foreseen, tensors have no memory.
    with _disable_current_modes():
        return generator.get_state().numpy()


def _set_torchs(generator: torch.Generator, state: Any) -> None:
    with _disable_current_modes():
        generator.set_state(torch.from_numpy(state))


# Generators that a module may have of its own.
_STATES: dict[type, _State] = {
    torch.Generator: _State(_torchs, _set_torchs),
    random.Random: _State(random.Random.getstate, random.Random.setstate),
    np.random.RandomState: _State(np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: _State(lambda one: one.bit_generator.state, _set_numpys),
}


class _Name(NamedTuple):
    """A name in a dict of globals, or an attribute of an object, a class or a Python module."""

    owner: Any
    name: str

    def values(self) -> list[Any]:
        if isinstance(self.owner, dict):
            return [self.owner[self.name]] if self.name in self.owner else []
        return [getattr(self.owner, self.name)] if hasattr(self.owner, self.name) else []

    def write(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        elif isinstance(self.owner, type):
            type.__setattr__(self.owner, self.name, value)
        else:
            # The method of the class may refuse changes.
            object.__setattr__(self.owner, self.name, value)


@lru_cache(4096)
def _is_users(name: str) -> bool:
    """True for the name of a Python module that is not installed."""
    if name.partition(".")[0] in ("torch", "ucudnn"):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return name == "__main__" or (file is not None and not file.startswith(_INSTALLED))


def _is_followed(kind: Any) -> bool:
    return str(getattr(kind, "__module__", "")).partition(".")[0] not in _LIBRARIES


@lru_cache(4096)
def _methods(kind: Any) -> tuple[FunctionType, ...]:
    """The methods of a class that are no library's."""
    found = [one for cls in kind.__mro__ if _is_users(cls.__module__) for one in vars(cls).values()]
    found = [getattr(one, "__func__", getattr(one, "fget", one)) for one in found]
    return tuple(one for one in found if type(one) is FunctionType)


@lru_cache(4096)
def _class_names(kind: Any) -> tuple[str, ...]:
    """Attributes of a class that are neither methods nor Python's own."""
    return tuple(
        name
        for name, one in vars(kind).items()
        if not (name.startswith("__") or callable(one) or hasattr(one, "__get__"))
    )


def _outside(function: FunctionType) -> Iterator[Any]:
    """The variables outside of a function that its code reads."""
    yield from function.__closure__ or ()
    if not _is_users(function.__module__ or ""):
        return
    names = function.__globals__
    for name, attributes in _global_names(function):
        value = names.get(name, len)
        if isinstance(value, ModuleType):
            if _is_users(value.__name__):
                yield from (_Name(value, one) for one in attributes if hasattr(value, one))
        elif not isinstance(value, BuiltinFunctionType):
            yield _Name(names, name)


@lru_cache(4096)
def _global_names(function: FunctionType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Globals that a function, or one inside it, reads, and what attributes of them it reads."""
    codes, read = [function.__code__], dict[str, set[str]]()
    for code in codes:
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
        last = ""
        for one in dis.get_instructions(code):
            if one.opname == "LOAD_GLOBAL":
                last = str(one.argval)
                read.setdefault(last, set())
            elif last and one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                read[last].add(str(one.argval))
                last = ""
            elif one.opname != "CACHE":
                last = ""
    return tuple((name, tuple(sorted(names))) for name, names in sorted(read.items()))


def _values(holder: Any) -> list[Any]:
    """The values that a holder holds."""
    if isinstance(holder, _Name):
        return holder.values()
    if isinstance(holder, CellType):
        try:
            return [holder.cell_contents]
        except ValueError:  # not assigned yet
            return []
    if isinstance(holder, np.ndarray):
        return [holder.tobytes()]
    return [*(dict.values(holder) if isinstance(holder, dict) else holder)]


def _copy(holder: Any) -> Any:
    if isinstance(holder, np.ndarray):
        return holder.copy()
    if isinstance(holder, (_Name, CellType)):
        return _values(holder)
    if isinstance(holder, dict):
        # Most dicts of a module are empty, and stay so. A subclass may have other items.
        return dict(dict.items(holder)) if len(holder) else ()
    return [*holder]


def _holds(holder: Any, content: Any) -> bool:
    """True if a holder holds the same objects as when it was copied."""
    if isinstance(holder, np.ndarray):
        return bool(holder.shape == content.shape and holder.tobytes() == content.tobytes())
    live = _values(holder) if isinstance(holder, (_Name, CellType)) else holder
    if len(live) != len(content):
        return False
    if isinstance(live, dict) and content:
        values = dict.values(live), content.values()
        return all(map(is_, live, content)) and all(map(is_, *values))
    return all(map(is_, live, content))


def _put_back(holder: Any, content: Any) -> None:
    """Let a holder hold what it held when it was copied."""
    if isinstance(holder, np.ndarray):
        holder[...] = content
    elif isinstance(holder, (_Name, CellType)):
        for one in content:
            if isinstance(holder, _Name):
                holder.write(one)
            else:
                holder.cell_contents = one
    else:
        # The methods of the base are called, because those of a subclass may do more.
        base: Any = next(one for one in _CONTAINERS if isinstance(holder, one))
        base.clear(holder)
        (base.extend if base in (list, deque) else base.update)(holder, content or ())


def values_in(value: Any) -> list[Any]:
    """Copies of the tensors and plain values that an object holds, without those of modules."""
    found, seen, stack = list[Any](), dict[int, Any](), [(value, 0)]
    while stack:
        one, depth = stack.pop()
        if isinstance(one, Tensor):
            found.append(one.detach().clone())
        elif isinstance(one, (bool, int, float, complex, str, bytes, type(None))):
            found.append(one)
        elif isinstance(one, np.ndarray):
            found.append(one.tobytes())
        elif not (id(one) in seen or type(one) in _LEAVES or isinstance(one, nn.Module)):
            seen[id(one)] = one
            stack += [(each, depth + 1) for each in _opened(one)[1] if depth < _DEEPEST]
    return found


def left_by(module: nn.Module, name: str) -> dict[str, list[Any]]:
    """Copies of what attributes of a module hold, and variables that its methods read, by name.

    Buffers and parameters are left out.
    """
    prefix = f"{name}." if name else ""
    found = {
        f"its attribute {prefix + key!r}": values_in(value)
        for key, value in vars(module).items()
        if key not in OF_ANY_MODULE and not isinstance(value, nn.Parameter)
    }
    others = _opened_class(type(module))[0]
    for number, one in enumerate(others):
        key = one.name if isinstance(one, _Name) else f"number {number} of its closures"
        found.setdefault(f"the variable {key!r}", []).extend(
            each for value in _values(one) for each in values_in(value)
        )
    return found


class Remembered:
    """What a forward reads beside its arguments; in this context, it is again as it was.

    When the context ends, everything is as it was before the context, so that a repeated forward
    leaves nothing behind.

    Args:
        module: the module whose forward is about to run.
        name: its name for messages.
        updates: True: the forward may change buffers in place, so that their values are copied.
        arguments: the module's arguments; what objects among them hold is put back, too.
    """

    @untraced
    def __init__(
        self, module: nn.Module, name: str, *, updates: bool, arguments: Sequence[Any] = ()
    ) -> None:
        self._name = name
        objects = [one for one in arguments if type(one) not in _LEAVES]
        self._then = [(one, _copy(one)) for one in holders(module, objects)]
        self._modules = [*module.modules()]
        self._clones: list[tuple[Any, str, Tensor]] = []
        if updates:
            self._clones = [
                (one._buffers, key, buffer.detach().clone())
                for one in self._modules
                for key, buffer in one._buffers.items()
                if buffer is not None and not buffer.is_inference()
            ]
        self._hooked = {id(one): dict(one) for one in self._hooks()}
        cloned = {id(buffers) for buffers, _, _ in self._clones}
        tensors, generators = dict[int, Tensor](), dict[int, Any]()
        for holder, then in self._then:
            if isinstance(holder, np.ndarray):
                continue
            for one in then.values() if isinstance(then, dict) else then:
                if type(one) in PLAIN and id(holder) not in cloned:
                    tensors[id(one)] = one
                elif type(one) in _STATES:
                    generators[id(one)] = one
        read = [one for one in tensors.values() if not one.is_inference()]
        self._read: list[list[Any]] = [[one, one._version] for one in read]
        some = read[:: max(1, len(read) // _SAMPLES)]
        self._samples = [(one, _sample(one)) for one in some]
        # The backward passes in which these were compared: a pass changes no parameter.
        self._compared = set[int]()
        generators |= {id(one): one for one in arguments if type(one) in _STATES}
        self._generators = [(one, _STATES[type(one)]) for one in generators.values()]
        self._drawn = self.numbers()

    def _hooks(self) -> list[Any]:
        """The dicts of hooks that hold any."""
        dicts = ([vars(one)[name] for name in _HOOKS] for one in self._modules)
        return [one for each in dicts for one in each if one]

    @untraced
    def numbers(self) -> list[Any]:
        """The states of the generators of random numbers that the forward may use."""
        own = [state.read(one) for one, state in self._generators]
        return [random.getstate(), np.random.get_state(), *own]

    @untraced
    def draw_from(self, numbers: list[Any]) -> None:
        """Put these generators into the states that `numbers` returned."""
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])
        for (one, state), drawn in zip(self._generators, numbers[2:], strict=True):
            state.write(one, drawn)

    @untraced
    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The context for a forward that begins now, and the context for each one that repeats it.

        In the second one, all generators but torch's draw what they draw from now on. Those of
        torch are put back by `torch.utils.checkpoint`.
        """
        again = copy.copy(self)
        again._drawn = self.numbers()
        return nullcontext(), again

    @untraced
    def seal(self) -> None:
        """Note that the forward is over: what changes from now on, changes before a repetition."""
        for entry in self._read:
            entry[1] = entry[0]._version

    @untraced
    def __enter__(self) -> None:
        changed: list[Tensor] = [one for one, version in self._read if one._version > version]
        task = torch._C._current_graph_task_id()
        if task not in self._compared:
            changed += [one for one, sample in self._samples if _sample(one) != sample]
        if task != -1:
            self._compared.add(task)
        if changed:
            raise RuntimeError(
                f"{self._name} is computed again in backward, and a parameter or another tensor of "
                f"shape {[*changed[0].shape]} that it reads has been changed in place since its "
                f"forward; run backward before this change, or leave the module out of the plan's "
                f"segments"
            )
        self._now: list[Any] = []
        for holder, then in self._then:
            if _holds(holder, then):
                self._now.append(then)
            else:
                self._now.append(_copy(holder))
                _put_back(holder, _unsharded(then, self._now[-1]))
        # The repeated forward gets copies, because it may change a buffer, while its value is
        # needed again if the graph is retained and backward runs once more.
        for buffers, key, value in self._clones:
            buffers[key] = value.clone()
        # A hook that was registered since is not called. No hook that was removed since is missing:
        # hooks inside a segment are torch's own.
        self._hooks_now = [(one, dict(one)) for one in self._hooks()]
        for one, _ in self._hooks_now:
            _put_back(one, self._hooked.get(id(one), {}))
        self._drawn_now = self.numbers()
        self.draw_from(self._drawn)

    @untraced
    def __exit__(self, *error: object) -> None:
        del error
        self.draw_from(self._drawn_now)
        for hooks, now in self._hooks_now:
            _put_back(hooks, now)
        for (holder, _), now in zip(self._then, self._now, strict=True):
            if not _holds(holder, now):
                _put_back(holder, now)
        del self._now, self._hooks_now
        self.seal()


def _unsharded(then: Any, now: Any) -> Any:
    """What is put back: sharded parameters stay as they are now, because FSDP2 exchanges them."""
    if not isinstance(then, dict):
        return then
    kept = {
        key: now[key]
        for key, one in then.items()
        if isinstance(one, Tensor) and type(one) not in PLAIN and key in now
    }
    return {**then, **kept}


def _sample(tensor: Tensor) -> bytes:
    """Some elements of a tensor on a CPU: writing through `.data` changes no version."""
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not (is_dense and tensor.numel() and tensor.is_floating_point()):
        return b""
    steps = [max(1, -(-size // _ELEMENTS)) for size in tensor.shape]
    some = tensor.detach()[tuple(slice(None, None, step) for step in steps)]
    return repr(some.flatten()[:: max(1, some.numel() // _ELEMENTS)].tolist()).encode()
