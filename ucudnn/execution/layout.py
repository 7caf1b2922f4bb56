"""Layout of a model: convert it to channels_last and back, keeping Parameters and values."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ucudnn.backends.tensors import CHANNELS_LAST_BY_RANK, in_channels_last

# Attribute of a module: strides of its own parameters and buffers before `lay_out_`, by name.
_STRIDES = "_ucudnn_strides"
_RANKS = frozenset(rank + 2 for rank in CHANNELS_LAST_BY_RANK)
# Exact types: the memory of a subclass, such as a sharded DTensor of FSDP2, is not its own.
_PLAIN = (Tensor, nn.Parameter)


def axes_of(model: nn.Module) -> frozenset[int]:
    """The numbers of axes, out of 4 and 5, that parameters of a model have.

    An input is converted only if it has one of these numbers of axes. A clip that a 2-D model takes
    apart into images stays as it is.

    >>> axes_of(nn.Sequential(nn.Conv1d(2, 2, 1), nn.Conv3d(2, 2, 1)))
    frozenset({5})
    """
    return frozenset(parameter.dim() for parameter in model.parameters()) & _RANKS


@dataclass(frozen=True, slots=True)
class InputsFollow:
    """A forward pre-hook that converts the inputs of a module to channels_last.

    Args:
        axes: numbers of axes of the inputs that it converts.
    """

    axes: frozenset[int]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs, in channels_last."""
        del module
        return self.laid_out(args), self.laid_out(kwargs)

    def laid_out(self, tree: Any) -> Any:
        """A tree of values, with its plain tensors of these numbers of axes in channels_last."""
        return tree_map_only(Tensor, self._laid_out, tree)

    def _laid_out(self, tensor: Tensor) -> Tensor:
        is_image = tensor.dim() in self.axes and tensor.layout is torch.strided
        return in_channels_last(tensor) if is_image else tensor


def lay_out_(model: nn.Module, parameters: bool = True) -> None:
    """Convert a model to channels_last, in place; its inputs are converted at each call.

    Parameters, buffers, gradients and the state of optimisers get other strides; they stay the same
    objects with the same values. Doing so twice does no harm.

    Args:
        model: any module.
        parameters: False leaves all these as they are, and every convolution converts its input, so
            that torch also computes in channels_last. This is always so if parameters are not plain
            tensors, such as those that FSDP2 has sharded.
    """
    # A second call must not record the channels_last strides of the first as the original ones.
    restore_layout_(model)
    if not (parameters and all(type(one) in _PLAIN for one in model.parameters())):
        for module in model.modules():
            # torch computes in channels_last if either the input or the filter lies so, hence a
            # hook on every convolution has the effect that laying out the filters would have.
            if isinstance(module, nn.modules.conv._ConvNd):
                _follow_inputs(module, frozenset({module.weight.dim()}) & _RANKS)
        return
    _follow_inputs(model, axes_of(model))
    # Recorded for every module before any tensor changes: by the time the second of two modules
    # that share a parameter is met, the parameter would have its new strides.
    strides = {
        id(module): {name: tensor.stride() for name, tensor in _own(module)}
        for module in model.modules()
    }
    for module in model.modules():
        if strides[id(module)]:
            vars(module)[_STRIDES] = strides[id(module)]

    def laid_out(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
        del module, name
        return in_channels_last(tensor)

    _change(model, laid_out)


def restore_layout_(model: nn.Module) -> None:
    """Restore the strides that a model had before `lay_out_`, in place."""

    def restored(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
        strides = vars(module).get(_STRIDES, {}).get(name)
        # the tensor may have been replaced since
        if strides is None or len(strides) != tensor.dim() or strides == tensor.stride():
            return tensor
        return torch.empty_strided(
            tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)

    _change(model, restored)
    for module in model.modules():
        vars(module).pop(_STRIDES, None)
        # Found by type, not by a handle kept from before, because a copied or unpickled model has
        # the hooks but no valid handles.
        for key, hook in list(module._forward_pre_hooks.items()):
            if type(hook) is InputsFollow:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def memory_format_of(model: nn.Module) -> str:
    """The memory format of a plan for a model as it is: "channels_last" after `lay_out_`.

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


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters and buffers with four or five axes."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None and type(tensor) in _PLAIN and tensor.dim() in _RANKS:
                yield name, tensor


@torch.no_grad()
def _change(model: nn.Module, laid_out: Callable[[nn.Module, str, Tensor], Tensor]) -> None:
    """Change the strides of a model's tensors, their gradients and their optimiser state."""
    changed: dict[int, Tensor] = {}
    for module in model.modules():
        for name, tensor in _own(module):
            # `.data` swaps the memory below the Parameter object, which optimisers and users hold.
            found = laid_out(module, name, tensor.data)
            if id(tensor) in changed or found.stride() == tensor.stride():
                continue
            tensor.data = found
            changed[id(tensor)] = tensor
            if tensor.grad is not None:
                tensor.grad.data = _like(tensor, tensor.grad)
    if changed:
        _change_optimizers(changed)


def _change_optimizers(changed: dict[int, Tensor]) -> None:
    """Give the state of optimisers the strides of their parameters.

    torch's fused optimisers read both in the order of memory, and compute something else if the
    orders differ (torch 2.13, CPU). All live optimisers are searched, because a parameter has no
    reference to its optimiser.
    """
    for one in gc.get_objects():
        # `isinstance` would read `__class__`, which lazy proxies among these objects may implement.
        if not issubclass(type(one), torch.optim.Optimizer):
            continue
        for parameter, state in one.state.items():
            if id(parameter) in changed and isinstance(state, dict):
                for value in state.values():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        value.data = _like(parameter, value)


def _like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """The values of a tensor in the strides of a parameter."""
    strided = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return strided.copy_(tensor.data)
