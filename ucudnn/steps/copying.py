"""Copy a model and its inputs: steps and traces run on the copies, so the originals stay as is."""

from __future__ import annotations

import copy
import copyreg
import io
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn
from weakref import ReferenceType, WeakKeyDictionary, WeakMethod, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ucudnn.backends.tensors import PLAIN
from ucudnn.errors import UnsupportedError, first_line
from ucudnn.execution.compiling import CompiledCall, contexts_apart, recompiled

# A tensor may be a small part of larger memory, such as a batch of a data set. If the memory is
# more than this many times as large as the tensor, only the tensor's part of the memory is copied.
_PART = 2


def copied(
    model: nn.Module, inputs: Any, fake_mode: FakeTensorMode | None = None
) -> tuple[nn.Module, Any]:
    """Copy a model and its inputs with all objects that they refer to, even in closures of hooks.

    Steps on the copies leave the originals alone. The parameters of the copied model have no
    gradients. Classes and globals are not copied. Parts of the model that torch.compile compiled
    are compiled anew, so that the copy shares no compiled code with the original. With a fake mode,
    the copies of parameters, buffers and inputs are fake tensors, which have no memory; and an
    object that cannot be copied, such as a lock, is shared with the original, unless it is a module
    or a tensor.

    >>> layer = nn.Linear(2, 1)
    >>> twin, _ = copied(layer, torch.ones(3, 2))
    >>> torch.equal(twin.weight, layer.weight), twin.weight.data_ptr() == layer.weight.data_ptr()
    (True, False)
    """
    shared: dict[int, Any] = {}
    wrapped = [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
    while True:
        memo = {**shared, **contexts_apart(model), **{id(one): _OfOneRank() for one in wrapped}}
        try:
            with _Real() if fake_mode is None else _Fake(fake_mode, model, inputs):
                found: tuple[nn.Module, Any] = copy.deepcopy((model, inputs), memo)
                for one in wrapped:
                    memo[id(one)].module = copy.deepcopy(one.module, memo)
                _Values(memo).renew()
            # Instances of the plain class `object` serve as marks that are compared by identity, so
            # the copy must share them. If the copy has duplicated such marks, copying starts again.
            marks = {id(one): one for one in memo[id(memo)] if type(one) is object}
            if marks.keys() <= shared.keys():
                break
            shared.update(marks)
        except RecursionError as error:
            raise _refusal("objects are nested too deeply") from error
        # Objects that the model refers to may raise anything while they are copied.
        except Exception as error:
            part = _part_that_failed(error)
            # Objects of these types cannot be copied and are no state of a model, so the copy
            # shares them. With a fake mode, it shares any object that cannot be copied and is no
            # module or tensor.
            is_kept = isinstance(part, (ModuleType, ContextVar, WeakMethod)) or (
                fake_mode is not None and not isinstance(part, (nn.Module, Tensor))
            )
            if part is None or id(part) in shared or not is_kept:
                raise _refusal(first_line(error)) from error
            shared[id(part)] = _Unavailable(part) if _is_consumed(part) else part
    for module in model.modules():
        call: Any = module._compiled_call_impl
        if call is not None:
            twin = memo[id(module)]
            twin._compiled_call_impl = (
                CompiledCall(twin, call.compiled)
                if isinstance(call, CompiledCall)
                else recompiled(call, twin._call_impl)
            )
    if not _memory(model).isdisjoint(_memory(found[0])):
        raise _refusal("a part of it shares its tensors with its copies")
    return found


def _refusal(reason: str) -> UnsupportedError:
    return UnsupportedError(f"the model cannot be copied: {reason}")


def _memory(model: nn.Module) -> set[int]:
    """Memory addresses of a model's parameters and buffers, except those without memory."""
    tensors = [*model.parameters(), *model.buffers()]
    plain = [one for one in tensors if type(one) in PLAIN]
    plain = [one for one in plain if one.layout is torch.strided and not one.is_quantized]
    return {one.untyped_storage().data_ptr() for one in plain} - {0}


def _part_that_failed(error: BaseException) -> Any:
    """The innermost object that was being copied when an error was raised."""
    part, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code is copy.deepcopy.__code__:
            part = frame.tb_frame.f_locals["x"]
        frame = frame.tb_next
    return part


def _is_consumed(part: object) -> bool:
    """True for an iterator, unless it is a file.

    If a copy of the model took items from the iterator, the original would no longer get them.
    """
    return hasattr(type(part), "__next__") and not isinstance(part, io.IOBase)


class _OfOneRank(nn.Module):
    """Replaces a DistributedDataParallel in a copy, which must not wait for other ranks."""

    module: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class _Unavailable:
    """Replaces an iterator that cannot be copied, and raises an error when it is used."""

    def __init__(self, original: object) -> None:
        self._kind = type(original).__name__

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> NoReturn:
        raise RuntimeError(f"forward draws from a {self._kind}, which cannot be copied")


class _Real(TorchFunctionMode):
    """Makes deepcopy copy non-leaf tensors, too, and of larger memory only a tensor's own part."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is Tensor.__deepcopy__ and id(args[0]) not in args[1]:
            tensor: Tensor = args[0]
            if not tensor.is_leaf or tensor.is_quantized or _is_part(tensor):
                twin = tensor.detach().clone().requires_grad_(tensor.requires_grad)
                args[1][id(tensor)] = twin
                return twin
        return func(*args, **(kwargs or {}))


class _Fake(TorchFunctionMode):
    """Makes deepcopy copy parameters, buffers and inputs as fake tensors, other tensors as real."""

    def __init__(self, fake_mode: FakeTensorMode, model: nn.Module, inputs: Any) -> None:
        super().__init__()
        self._fake_mode = fake_mode
        self._wanted = set(map(id, [*model.buffers(), *tree_leaves(inputs)]))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        # `Parameter.__deepcopy__` calls `clone`, so a parameter arrives here.
        if func is torch._C.TensorBase.clone:
            return self._faked(args[0])
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            is_faked = tensor.requires_grad or id(tensor) in self._wanted
            # torch has no quantised fake tensors, so quantised tensors are copied as they are.
            is_faked &= not tensor.is_quantized
            memo[id(tensor)] = self._faked(tensor) if is_faked else tensor.detach().clone()
        return memo[id(tensor)]

    def _faked(self, tensor: Tensor) -> Tensor:
        fake = self._fake_mode.from_tensor(tensor.detach())
        return fake.detach().requires_grad_(tensor.requires_grad)


class _Values:
    """Copies what `copy.deepcopy` has not copied, such as functions, inside the objects it copied.

    A function may have state of the model in its closure. A weak reference would still refer to an
    object of the original model.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._cells: dict[int, CellType] = {}

    def renew(self) -> None:
        seen = {id(self._memo)}  # the key under which deepcopy keeps the originals
        while left := [(key, one) for key, one in self._memo.items() if key not in seen]:
            seen.update(key for key, _ in left)
            # An entry of the memo whose value is the original itself stands for a shared object,
            # and is skipped here. The copies get such entries, too, so that a later deepcopy does
            # not copy a copy again.
            holders = [holder for key, holder in left if id(holder) != key]
            self._memo.update({id(holder): holder for holder in holders})
            for holder in holders:
                self._renew_in(holder)
                self._renew_in(getattr(holder, "__dict__", None))
                self._renew_slots(holder)
                self._renew_weak(holder)

    def _renew_in(self, holder: Any) -> None:
        base: Any = next((one for one in (dict, list, deque) if isinstance(holder, one)), None)
        if base is None:
            return
        found = base.items(holder) if base is dict else enumerate(base.__iter__(holder))
        for place, value in [*found]:
            renewed = self._renewed(value)
            if renewed is not value:
                # The method of the base class is called, because that of a subclass may refuse
                # changes.
                base.__setitem__(holder, place, renewed)

    def _renew_slots(self, holder: Any) -> None:
        # The methods of `object` are called, because those of a class may refuse changes.
        for name in copyreg._slotnames(type(holder)):  # type: ignore[attr-defined]
            try:
                value = object.__getattribute__(holder, name)
            except AttributeError:  # not assigned yet
                continue
            renewed = self._renewed(value)
            if renewed is not value:
                object.__setattr__(holder, name, renewed)

    def _renew_weak(self, holder: Any) -> None:
        if not isinstance(holder, (WeakKeyDictionary, WeakValueDictionary)):
            return
        for key, value in [*holder.items()]:
            twins = self._memo.get(id(key), key), self._memo.get(id(value), value)
            if twins[0] is not key:
                del holder[key]
            holder[twins[0]] = twins[1]

    def _renewed(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, tuple):
            return self._tuple(value)
        if kind is FunctionType:
            return self._function(value)
        if kind is MethodType and type(value.__func__) is FunctionType:
            return MethodType(self._function(value.__func__), value.__self__)
        if kind is partial:
            return self._partial(value)
        if kind in (ReferenceType, WeakMethod):
            return self._reference(value)
        return value

    def _tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        parts = [*map(self._renewed, tuple.__iter__(value))]
        if all(map(is_, parts, tuple.__iter__(value))):
            return value
        return tuple.__new__(type(value), parts)

    def _partial(self, value: partial[Any]) -> partial[Any]:
        found, args = self._renewed(value.func), self._renewed(value.args)
        if found is value.func and args is value.args:
            return value
        return partial(found, *args, **value.keywords)

    def _reference(self, value: Any) -> Any:
        found = value()
        is_method = type(value) is WeakMethod and found is not None
        target = self._memo.get(id(found.__self__ if is_method else found))
        if target is None:
            return value
        if is_method:
            return WeakMethod(MethodType(found.__func__, target))
        return ReferenceType(target)

    def _function(self, function: FunctionType) -> Any:
        found = self._memo.get(id(function))
        if found is not None:
            return found
        # This attribute of a compiled function is the function that torch.compile was given.
        original = getattr(function, "_torchdynamo_orig_callable", None)
        if original is not None:
            again = recompiled(function, self._copy(original))
        elif function.__closure__ or self._has_state(function):
            again = self._closure(function)
        else:
            return function
        self._memo[id(function)] = again
        return again

    def _has_state(self, function: FunctionType) -> bool:
        defaults = function.__defaults__, function.__kwdefaults__ or None
        return self._copy(defaults) is not defaults

    def _closure(self, function: FunctionType) -> FunctionType:
        # Several functions may share a variable of their closures; their copies then share the
        # copied variable.
        cells = function.__closure__ or ()
        fresh = [cell for cell in cells if id(cell) not in self._cells]
        self._cells.update({id(cell): CellType() for cell in fresh})
        again = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            closure=tuple(self._cells[id(cell)] for cell in cells),
        )
        # The copy is entered in the memo before the variables of the function are copied, because
        # one of the variables may be the function itself.
        self._memo[id(function)] = again
        again.__defaults__ = self._copy(function.__defaults__)
        again.__kwdefaults__ = self._copy(function.__kwdefaults__)
        vars(again).update({name: self._copy(one) for name, one in vars(function).items()})
        for cell in fresh:
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._cells[id(cell)].cell_contents = self._copy(value)
        return again

    def _copy(self, value: Any) -> Any:
        return self._renewed(copy.deepcopy(value, self._memo))


def _is_part(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().nbytes() > _PART * tensor.numel() * tensor.element_size()
