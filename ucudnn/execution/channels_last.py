"""Convert a model to channels_last and back; its Parameter objects and values stay the same."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ucudnn.backends.tensors import CHANNELS_LAST_BY_RANK, PLAIN, in_channels_last
from ucudnn.errors import warn
from ucudnn.problem import strides_of

# Name of the attribute in which a module keeps the shapes and strides that its own parameters and
# buffers had before `lay_out_`.
_STRIDES = "_ucudnn_strides"
_RANKS = frozenset(rank + 2 for rank in CHANNELS_LAST_BY_RANK)


def axes_of(model: nn.Module) -> frozenset[int]:
    """The numbers of axes, 4 or 5, that parameters of a model have.

    An input is converted to channels_last only if it has one of these numbers of axes. So if a
    model divides 5-D video clips into images for 2-D convolutions, the clips stay as they are.

    >>> axes_of(nn.Sequential(nn.Conv1d(2, 2, 1), nn.Conv3d(2, 2, 1)))
    frozenset({5})
    """
    return frozenset(parameter.dim() for parameter in model.parameters()) & _RANKS


@dataclass(frozen=True, slots=True)
class InputsFollow:
    """A forward pre-hook that converts tensors in the inputs of a module to channels_last."""

    axes: frozenset[int]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs, in channels_last if their `dim` is one of `axes`."""
        del module
        args, kwargs = tree_map_only(Tensor, self._laid_out, (args, kwargs))
        return args, kwargs

    def _laid_out(self, tensor: Tensor) -> Tensor:
        is_image = tensor.dim() in self.axes and tensor.layout is torch.strided
        # Under `vmap` a tensor has more axes than `dim` says, so it is left as it is. While Dynamo
        # compiles, this is not tested, because Dynamo cannot trace the test.
        is_plain = torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active()
        return in_channels_last(tensor) if is_image and is_plain else tensor


def why_not_channels_last(model: nn.Module) -> str | None:
    """Reason why parameters and buffers of a model must keep their strides; None if they need not.

    In channels_last they would get new memory. If something else uses their old memory, it would no
    longer see what training writes. `model` must be the user's own model and not a copy, because a
    copy shares its memory with nothing.

    >>> model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    >>> why_not_channels_last(model)
    >>> model[1].weight.data = model[0].weight.data
    >>> why_not_channels_last(model)
    'another tensor uses the memory of 0.weight'
    """
    return _why_not(model, _changes(model))


def lay_out_(model: nn.Module, parameters: bool = True) -> None:
    """Convert a model to channels_last, in place; its inputs are converted at each call.

    Parameters, buffers, gradients and the state of optimisers get other strides; they stay the same
    objects with the same values. A second call does no harm. If a call fails, nothing has changed.

    With `parameters=False` all these tensors keep their strides. Instead every convolution converts
    its input, which also makes torch compute in channels_last. The same is done if parameters are
    not plain tensors, such as those that FSDP2 has sharded. It is also done, with a warning, if
    something else uses the memory of a parameter or buffer.
    """
    is_kept = not (parameters and all(type(one) in PLAIN for one in model.parameters()))
    changes = [] if is_kept else _changes(model)
    reason = _why_not(model, changes)
    if reason is not None:
        warn(
            f"parameters and buffers keep their strides, because {reason}; each convolution "
            f"converts its operands to channels_last instead, which takes time"
        )
    if is_kept or reason is not None:
        restore_layout_(model)
        _follow_in_convolutions(model)
        return
    # The strides of all modules are recorded before any tensor changes. Otherwise a parameter that
    # two modules share would have its new strides when the second module is recorded.
    recorded = {
        module: {name: (tensor.shape, _first_strides(module, name, tensor)) for name, tensor in own}
        for module in model.modules()
        if (own := list(_own(module)))
    }
    _change(changes)
    _forget(model)
    for module, strides in recorded.items():
        vars(module)[_STRIDES] = strides
    _follow_inputs(model, axes_of(model))


def lay_out_copy(model: nn.Module) -> None:
    """Convert a copy of a model to channels_last; nothing else may refer to its tensors.

    Its parameters and buffers are replaced by new ones, because the copy may consist of fake
    tensors, whose strides cannot change in place.
    """
    _follow_inputs(model, axes_of(model))
    laid_out: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.dim() not in _RANKS:
                    continue
                if id(tensor) not in laid_out:
                    found, needs = in_channels_last(tensor.detach()), tensor.requires_grad
                    is_weight = isinstance(tensor, nn.Parameter)
                    laid_out[id(tensor)] = nn.Parameter(found, needs) if is_weight else found
                tensors[name] = laid_out[id(tensor)]


def restore_layout_(model: nn.Module) -> None:
    """Restore the strides that a model's tensors had before `lay_out_`, in place.

    If by now something else uses the memory of a tensor, the strides of all tensors stay as they
    are, and a warning says why.
    """
    changes = _changes(model, is_back=True)
    reason = _why_not(model, changes)
    if reason is None:
        _change(changes)
    else:
        warn(f"parameters and buffers keep the strides of channels_last, because {reason}")
    _forget(model)


def _forget(model: nn.Module) -> None:
    for module in model.modules():
        vars(module).pop(_STRIDES, None)
        # The hooks are found by their type, and not by handles that were kept, because a copied or
        # unpickled model has the hooks, but no valid handles.
        for key, hook in list(module._forward_pre_hooks.items()):
            if type(hook) is InputsFollow:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def memory_format_of(model: nn.Module) -> str:
    """The layout that a plan for this model must have: "channels_last" after `lay_out_`, or "keep".

    >>> model = nn.Conv2d(3, 4, 3)
    >>> lay_out_(model)
    >>> memory_format_of(model), memory_format_of(nn.Conv2d(3, 4, 3))
    ('channels_last', 'keep')
    """
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return "channels_last" if any(type(hook) is InputsFollow for hook in hooks) else "keep"


def _follow_inputs(module: nn.Module, axes: frozenset[int]) -> None:
    if axes:
        module.register_forward_pre_hook(InputsFollow(axes), with_kwargs=True)


def _follow_in_convolutions(model: nn.Module) -> None:
    for module in model.modules():
        # torch computes in channels_last if either the input or the filter is in that layout. So a
        # hook that converts the input of every convolution has the same effect as filters in that
        # layout.
        if isinstance(module, nn.modules.conv._ConvNd):
            _follow_inputs(module, frozenset({module.weight.dim()}) & _RANKS)


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None and type(tensor) in PLAIN and tensor.dim() in _RANKS:
                yield name, tensor


def _first_strides(module: nn.Module, name: str, tensor: Tensor) -> tuple[int, ...]:
    """A tensor's strides before `lay_out_`; its present ones if none are recorded for its shape."""
    shape, strides = vars(module).get(_STRIDES, {}).get(name, (None, ()))
    return strides if shape == tensor.shape else tensor.stride()


class _Change(NamedTuple):
    """A tensor, and the strides that it is to get."""

    name: str
    tensor: Tensor
    strides: tuple[int, ...]

    @property
    def moves(self) -> bool:
        """True if some elements get other places in memory by the new strides."""
        axes = zip(self.tensor.shape, self.tensor.stride(), self.strides, strict=True)
        return any(size > 1 and now != then for size, now, then in axes)

    def made(self) -> Tensor:
        """A tensor with the same values and new strides; in the same memory if no element moves."""
        old, shape = self.tensor.data, self.tensor.shape
        if not self.moves:
            return old.as_strided(shape, self.strides)
        new = torch.empty_strided(shape, self.strides, dtype=old.dtype, device=old.device)
        return new.copy_(old)


def _changes(model: nn.Module, *, is_back: bool = False) -> list[_Change]:
    """The changes to channels_last, or back, of tensors, their gradients and optimisers' state."""
    found: dict[int, _Change] = {}
    for path, module in model.named_modules():
        for name, tensor in _own(module):
            strides = strides_of(tensor.shape, is_channels_last=True)
            if is_back:
                strides = _first_strides(module, name, tensor)
            if strides != tensor.stride():
                full = f"{path}.{name}" if path else name
                found.setdefault(id(tensor), _Change(full, tensor, strides))
    return [*found.values(), *_that_follow(found)] if found else []


def _that_follow(changed: dict[int, _Change]) -> Iterator[_Change]:
    """The changes of the gradients and of the optimiser state of changed tensors.

    torch's fused optimisers read a parameter and its state in the order of memory, and compute
    wrong values if the two orders differ (torch 2.13, CPU).
    """
    for name, tensor, strides in changed.values():
        if tensor.grad is not None:
            yield _Change(f"the gradient of {name}", tensor.grad, strides)
    for parameter, state in optimizer_states(changed):
        name, _, strides = changed[id(parameter)]
        for value in tree_leaves(state):
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                yield _Change(f"the optimiser's state of {name}", value, strides)


def optimizer_states(parameters: Container[int]) -> Iterator[tuple[Tensor, Any]]:
    """Parameters with these ids, each with its state, from all optimisers of this process."""
    for one in optimizers():
        yield from ((key, state) for key, state in one.state.items() if id(key) in parameters)


def optimizers() -> Iterator[torch.optim.Optimizer]:
    """All optimisers of this process."""
    # A parameter has no reference to its optimiser, so all objects of the process are searched for
    # optimisers. `isinstance` would read `__class__`, which lazy proxies among these objects may
    # implement.
    return (one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer))


def _why_not(model: nn.Module, changes: Sequence[_Change]) -> str | None:
    moving = [one for one in changes if one.moves]
    if not moving:
        return None
    gc.collect()  # unreachable tensors must not count as users of memory
    users: defaultdict[int, set[int]] = defaultdict(set)
    # The model's tensors are added to the objects that `gc` lists, because `gc` does not list
    # objects that existed when `gc.freeze` was called.
    for one in chain(model.parameters(), model.buffers(), gc.get_objects()):
        if type(one) in PLAIN:
            users[_memory_of(one)].add(id(one))
    for name, tensor, _ in moving:
        # Only CPU tensors are tested: `is_shared` is true for all tensors of a GPU.
        if tensor.device.type == "cpu" and tensor.is_shared():
            return f"{name} is in shared memory"
        if _is_used_by_others(tensor, users[_memory_of(tensor)]):
            return f"another tensor uses the memory of {name}"
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
        size = tensor.numel() * tensor.element_size()
        if not is_dense or size != tensor.untyped_storage().nbytes():
            return f"{name} is expanded, or a part of something larger"
    return None


def _is_used_by_others(tensor: Tensor, users: set[int]) -> bool:
    others = users - {id(tensor)}
    base = tensor._base
    # A view keeps its base, the tensor that it is a view of, alive. If nothing but the view refers
    # to the base, the base does not count as another user of the memory.
    if base is not None and sys.getrefcount(base) == _references_of_a_base():
        others.discard(id(base))
    return bool(others)


def _references_of_a_base() -> int:
    """The result of `sys.getrefcount` for a tensor that only a view and a variable refer to."""
    view = torch.zeros(2).view(2)
    base = view._base
    return sys.getrefcount(base)


def _memory_of(tensor: Tensor) -> int:
    """A number that identifies a tensor's memory; 0 if it has no storage, such as a sparse one."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:
        return 0
    # A storage without memory, as on the meta device, has the pointer 0. Then `_cdata` identifies
    # the storage object.
    return storage.data_ptr() or storage._cdata


@torch.no_grad()
def _change(changes: Sequence[_Change]) -> None:
    """Give all tensors their new strides, or none of them if there is too little memory."""
    made = [one.made() for one in changes]
    for one, tensor in zip(changes, made, strict=True):
        # To assign `.data` replaces the memory, but keeps the Parameter object, to which optimisers
        # and users refer.
        one.tensor.data = tensor
