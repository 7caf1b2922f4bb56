"""What a module's forward reads beside its arguments, put back while that forward is repeated.

`torch.utils.checkpoint` repeats a forward with the same arguments, torch's random numbers and
autocast. Everything else may have changed since: parameters that `functional_call` has swapped, an
attribute that another module sets before each call, a global, the generators of Python and NumPy.
"""

from __future__ import annotations

import dis
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ucudnn.execution.compiling import untraced

# Values of these types are not changed, or hold nothing that a forward would read.
_PLAIN = {
    *(type(None), bool, int, float, complex, str, bytes, type, range, slice),
    *(ModuleType, BuiltinFunctionType, torch.dtype, torch.device, torch.Size, torch.Generator),
    *(Tensor, nn.Parameter, np.ndarray),
}
_CONTAINERS = {dict, OrderedDict, defaultdict, list, set, deque}
_TENSORS = {Tensor, nn.Parameter}
# Of so many parameters, an element is compared before a forward is repeated.
_SAMPLES = 32
# Attributes that every module has; of these, only tensors and modules are read by a forward.
OF_ANY_MODULE = vars(nn.Module()).keys()
_READ = {"_parameters", "_buffers", "_modules"}
# Containers with more values are data rather than state, and objects are followed only so far: a
# module may refer to all of a program, for example to its trainer.
_MOST_VALUES, _DEEPEST = 1000, 3
_LIBRARIES = {"torch", "numpy", "ucudnn", "builtins", "logging", "threading", "weakref"}


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
        if type(value) in _PLAIN or id(value) in seen:
            continue
        seen[id(value)] = value
        own, values = _opened(value)
        yield from own
        depth = 0 if isinstance(value, nn.Module) else depth + 1
        if depth <= _DEEPEST:
            stack += [(one, depth) for one in values]


def _opened(value: Any) -> tuple[list[Any], Iterable[Any]]:
    """The holders that an object is or has, and the values to be opened next."""
    kind: Any = type(value)
    if isinstance(value, nn.Module):
        return _opened_module(value)
    if kind in _CONTAINERS:
        return ([value], _values(value)) if len(value) <= _MOST_VALUES else ([], ())
    if kind is FunctionType:
        return [*_outside(value)], _read_by(value)
    if isinstance(value, tuple):
        return [], value
    if kind in (MethodType, partial):
        names = ("__self__", "__func__") if kind is MethodType else ("func", "args", "keywords")
        return [], [getattr(value, one) for one in names]
    has_own = _is_followed(kind) and hasattr(value, "__dict__")
    attributes = vars(value) if has_own else {}
    # An object may refer to any module of a program, for example to the one around it.
    return [attributes], [one for one in attributes.values() if not isinstance(one, nn.Module)]


def _opened_module(module: nn.Module) -> tuple[list[Any], list[Any]]:
    kind: Any = type(module)
    own: list[Any] = [vars(module)]
    values = [*_class_values(kind)]
    for name, one in vars(module).items():
        if name in _READ:
            own.append(one)
            values += one.values()
        elif name not in OF_ANY_MODULE:
            values.append(one)
    for function in _methods(kind):
        own += _outside(function)
        values += _read_by(function)
    return own, values


class _State(NamedTuple):
    """How to read and to write the state of a generator of random numbers."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]


def _set_numpys(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


# Generators that a module may have of its own.
_STATES: dict[type, _State] = {
    torch.Generator: _State(torch.Generator.get_state, torch.Generator.set_state),
    random.Random: _State(random.Random.getstate, random.Random.setstate),
    np.random.RandomState: _State(np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: _State(lambda one: one.bit_generator.state, _set_numpys),
}


class _Global(NamedTuple):
    """A name in the globals of a function."""

    names: dict[str, Any]
    name: str


@lru_cache(4096)
def _is_followed(kind: Any) -> bool:
    return kind.__module__.partition(".")[0] not in _LIBRARIES


@lru_cache(4096)
def _methods(kind: Any) -> tuple[FunctionType, ...]:
    """The methods of a class that are no library's."""
    own = [cls for cls in kind.__mro__ if _is_followed(cls)]
    return tuple(one for cls in own for one in vars(cls).values() if type(one) is FunctionType)


@lru_cache(4096)
def _class_values(kind: Any) -> tuple[Any, ...]:
    """Containers that are attributes of a class that is no library's."""
    own = [cls for cls in kind.__mro__ if _is_followed(cls)]
    return tuple(one for cls in own for one in vars(cls).values() if type(one) in _CONTAINERS)


def _outside(function: FunctionType) -> Iterator[CellType | _Global]:
    """The variables outside of a function that its code reads."""
    yield from function.__closure__ or ()
    for name in _global_names(function):
        if name in function.__globals__:
            yield _Global(function.__globals__, name)


@lru_cache(4096)
def _global_names(function: FunctionType) -> tuple[str, ...]:
    """Names of the globals that a function reads, or that functions inside it read."""
    codes, read = [function.__code__], set[str]()
    for code in codes:
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
        read |= {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    names, kinds = function.__globals__, (type, ModuleType, BuiltinFunctionType)
    return tuple(sorted(one for one in read if not isinstance(names.get(one, len), kinds)))


def _read_by(function: FunctionType) -> list[Any]:
    """The values of these variables, but for modules, which may be any part of a program.

    Of functions, those of the same file are among them.
    """
    found = [value for one in _outside(function) for value in _values(one)]
    here = function.__globals__
    return [
        one
        for one in found
        if not isinstance(one, nn.Module)
        and (type(one) is not FunctionType or one.__globals__ is here)
    ]


def _values(holder: Any) -> list[Any]:
    """The values that a holder holds."""
    if isinstance(holder, _Global):
        return [holder.names[holder.name]] if holder.name in holder.names else []
    if isinstance(holder, CellType):
        try:
            return [holder.cell_contents]
        except ValueError:  # not assigned yet
            return []
    return [*(holder.values() if isinstance(holder, dict) else holder)]


def _copy(holder: Any) -> Any:
    if isinstance(holder, (_Global, CellType)):
        return _values(holder)
    # Most dicts of a module are empty, and stay so.
    return (dict if isinstance(holder, dict) else list)(holder) if holder else ()


def _holds(holder: Any, content: Any) -> bool:
    """True if a holder holds the same objects as when it was copied."""
    live = _values(holder) if isinstance(holder, (_Global, CellType)) else holder
    if len(live) != len(content):
        return False
    if isinstance(live, dict) and content:
        return all(map(is_, live, content)) and all(map(is_, live.values(), content.values()))
    return all(map(is_, live, content))


def _put_back(holder: Any, content: Any) -> None:
    """Let a holder hold what it held when it was copied."""
    if isinstance(holder, _Global):
        if content:
            holder.names[holder.name] = content[0]
    elif isinstance(holder, CellType):
        if content:
            holder.cell_contents = content[0]
    else:
        holder.clear()
        if content:
            holder.extend(content) if isinstance(holder, (list, deque)) else holder.update(content)


def values_in(value: Any) -> list[Any]:
    """Copies of the tensors and plain values that an object holds, without those of modules."""
    found, seen, stack = list[Any](), dict[int, Any](), [(value, 0)]
    while stack:
        one, depth = stack.pop()
        if isinstance(one, Tensor):
            found.append(one.detach().clone())
        elif isinstance(one, (bool, int, float, complex, str, type(None))):
            found.append(one)
        elif not (id(one) in seen or type(one) in _PLAIN or isinstance(one, nn.Module)):
            seen[id(one)] = one
            inner = () if type(one) is FunctionType or depth == _DEEPEST else _opened(one)[1]
            stack += [(each, depth + 1) for each in inner]
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
    kind: Any = type(module)
    functions = [*_methods(kind)]
    functions += [one for one in vars(module).values() if type(one) is FunctionType]
    for function in functions:
        for key, holder in zip(_outside_names(function), _outside(function), strict=True):
            found[f"the variable {key!r}"] = [x for one in _values(holder) for x in values_in(one)]
    for cls in filter(_is_followed, kind.__mro__):
        containers = ((key, one) for key, one in vars(cls).items() if type(one) in _CONTAINERS)
        found |= {f"{key!r} of its class": values_in(one) for key, one in containers}
    return found


def _outside_names(function: FunctionType) -> list[str]:
    names = [one for one in _global_names(function) if one in function.__globals__]
    return [*function.__code__.co_freevars, *names]


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
        objects = [one for one in arguments if type(one) not in _PLAIN]
        self._then = [(one, _copy(one)) for one in holders(module, objects)]
        self._clones: list[tuple[Any, str, Tensor]] = []
        if updates:
            self._clones = [
                (one._buffers, key, buffer.detach().clone())
                for one in module.modules()
                for key, buffer in one._buffers.items()
                if buffer is not None and not buffer.is_inference()
            ]
        cloned = {id(buffers) for buffers, _, _ in self._clones}
        tensors, generators = dict[int, Tensor](), dict[int, Any]()
        for holder, then in self._then:
            for one in then.values() if isinstance(then, dict) else then:
                if type(one) in _TENSORS and id(holder) not in cloned:
                    tensors[id(one)] = one
                elif type(one) in _STATES:
                    generators[id(one)] = one
        read = [one for one in tensors.values() if not one.is_inference()]
        self._read: list[list[Any]] = [[one, one._version] for one in read]
        parameters = [one for one in read if type(one) is nn.Parameter]
        some = parameters[:: max(1, len(parameters) // _SAMPLES)]
        self._samples = [(one, _sample(one)) for one in some]
        self._generators = [(one, _STATES[type(one)]) for one in generators.values()]
        self._drawn = [state.read(one) for one, state in self._generators]

    @untraced
    def seal(self) -> None:
        """Note that the forward is over: what changes from now on, changes before a repetition."""
        for entry in self._read:
            entry[1] = entry[0]._version

    @untraced
    def __enter__(self) -> None:
        changed: list[Tensor] = [one for one, version in self._read if one._version > version]
        changed += [one for one, sample in self._samples if _sample(one) != sample]
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
        self._drawn_now = [state.read(one) for one, state in self._generators]
        for (one, state), drawn in zip(self._generators, self._drawn, strict=True):
            state.write(one, drawn)

    @untraced
    def __exit__(self, *error: object) -> None:
        del error
        for (one, state), drawn in zip(self._generators, self._drawn_now, strict=True):
            state.write(one, drawn)
        for (holder, _), now in zip(self._then, self._now, strict=True):
            if not _holds(holder, now):
                _put_back(holder, now)
        del self._now
        self.seal()


def _unsharded(then: Any, now: Any) -> Any:
    """What is put back: sharded parameters stay as they are now, because FSDP2 exchanges them."""
    if not isinstance(then, dict):
        return then
    kinds = (Tensor, nn.Parameter)
    kept = {
        key: now[key]
        for key, one in then.items()
        if isinstance(one, Tensor) and type(one) not in kinds and key in now
    }
    return {**then, **kept}


def _sample(tensor: Tensor) -> float | None:
    """One element of a parameter on a CPU: writing through `.data` changes no version."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return None
    if tensor.layout is not torch.strided or not tensor.is_floating_point():
        return None
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    middle = sum(size // 2 * stride for size, stride in pairs)
    one = tensor.detach().as_strided((), (), tensor.storage_offset() + middle)
    return float(one)


class Again:
    """The context in which one forward is repeated: what it read, and its random numbers.

    The random numbers of torch are put back by `torch.utils.checkpoint`, those of Python and NumPy
    here.
    """

    @untraced
    def __init__(self, remembered: Remembered) -> None:
        self._remembered = remembered
        self._then = _states()

    @untraced
    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The context for the first forward, and the context for each forward that repeats it."""
        return nullcontext(), self

    @untraced
    def __enter__(self) -> None:
        self._remembered.__enter__()
        self._now = _states()
        _set_states(self._then)

    @untraced
    def __exit__(self, *error: object) -> None:
        _set_states(self._now)
        self._remembered.__exit__(*error)


def _states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
