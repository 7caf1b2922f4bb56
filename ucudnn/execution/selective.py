"""Selective recomputation: results of normalisations and activation functions are computed again.

A normalisation or an activation function keeps its input for its own backward. Its result can be
computed from this input in little time, so operations that need the result in backward do not keep
it. In many networks these results are a large part of all activations (Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models, MLSys 2023, section 5). The mean and the
deviation that a normalisation keeps for its backward turn its repetition into one multiply-add.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

# Functions whose backward needs their input.
_KEEP_INPUT = {
    *(functional.batch_norm, functional.group_norm, functional.instance_norm),
    *(functional.layer_norm, functional.rms_norm, torch.group_norm, torch.layer_norm),
    *(functional.celu, functional.elu, functional.gelu, functional.glu, functional.hardsigmoid),
    *(functional.hardswish, functional.hardtanh, functional.leaky_relu, functional.logsigmoid),
    *(functional.mish, functional.prelu, functional.relu6, functional.selu, functional.silu),
    functional.softplus,
}
# Functions whose backward needs their result, and not their input.
_KEEP_RESULT = {
    *(functional.relu, functional.sigmoid, functional.tanh),
    *(torch.relu, torch.sigmoid, torch.tanh),
}
# Functions whose result is a multiply-add of their input, and the place of their weight, before
# that of their bias. In a layer norm the factor differs in each element, so that it would take more
# than one, and torch's kernel reads a row only once anyway.
_OF_GROUPS = 2
_MULTIPLY_ADDS: dict[Any, int] = {
    **dict.fromkeys((functional.group_norm, torch.group_norm), _OF_GROUPS),
    **dict.fromkeys((functional.batch_norm, functional.instance_norm), 3),
}
# The nodes that keep their mean and reciprocal deviation, in this order, after all other numbers.
_KEEP_MOMENTS = {"NativeGroupNormBackward0", "NativeBatchNormBackward0", "CudnnBatchNormBackward0"}
# On this type of device, smaller normalisations take no more time than the operators of a
# multiply-add.
_HOST, _LEAST_ELEMENTS = "cpu", 1 << 16
# Functions that update running statistics if this argument is true; they do not depend on them
# then.
_UPDATING = {functional.batch_norm: "training", functional.instance_norm: "use_input_stats"}


class _Call:
    """A call that can be repeated. Its first argument is the result of `source`, or a kept tensor.

    Attributes:
        uses: how many operations still need the result in backward.
        run: computes the result from the first argument.
    """

    def __init__(self, source: _Call | None, run: Callable[[Tensor], Tensor]) -> None:
        self.source = source
        self.uses = 0
        self.run = run
        self._stored: tuple[Tensor, int] | None = None

    def result(self, base: Tensor) -> Tensor:
        """The result, which is stored as long as other operations need it, too."""
        result, version = self._stored or (None, 0)
        # A checkpoint inside the segment may have given the result to code that changed it.
        if result is None or result._version != version:
            result = self.run(base if self.source is None else self.source.result(base))
        self._stored = (result, result._version) if self.uses > 0 else None
        return result


class _Repeatable(NamedTuple):
    """A result that can be computed again from a base, and the versions of both at that time."""

    call: _Call
    base: Tensor
    versions: tuple[int, ...]


@dataclass(eq=False, slots=True)
class _Saved:
    """What is kept instead of a tensor.

    Args:
        base: the tensor, or that from which it can be computed again.
        call: whose result is needed; None: the base.
        view: strides of this result, and shape, strides and offset in it; None: all of it.
    """

    base: Any
    call: _Call | None = None
    view: tuple[Any, Any, Any, Any] | None = None


class _Rectified(torch.autograd.Function):
    """ReLU or leaky ReLU, whose backward needs one tensor less than torch's own.

    The result is computed again for backward. If no other tensor has its memory then, the gradient
    of the input is written into it.
    """

    @staticmethod
    def forward(ctx: Any, input_: Tensor, func: Any, kwargs: dict[str, Any]) -> Tensor:
        result: Tensor = func(input_, **kwargs)
        if kwargs["inplace"]:
            ctx.mark_dirty(input_)
        ctx.save_for_backward(result)
        ctx.slope = kwargs.get("negative_slope", 0)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (result,) = ctx.saved_tensors
        # Beside `result` only this name counts as a user of the memory, if no one else has it. No
        # operation writes a gradient that has a graph, a tangent or an axis of `vmap` into it.
        memory = result.untyped_storage()
        is_alone = torch._C._storage_Use_Count(memory._cdata) == 2 and not (
            torch.is_grad_enabled()
            or _is_transformed()
            or torch._C._functorch.is_legacy_batchedtensor(gradient)
        )
        place = {"grad_input": result} if is_alone else {}
        if ctx.slope:
            found = torch.ops.aten.leaky_relu_backward(gradient, result, ctx.slope, True, **place)
        else:
            found = torch.ops.aten.threshold_backward(gradient, result, 0, **place)
        return found, None, None


class Selective(TorchFunctionMode):
    """In this context, no results of normalisations and activation functions are kept for backward.

    The gradients are the same: on a CPU bit for bit, or up to rounding if a normalisation has an
    input with gaps or a group norm has no weights; on a GPU up to rounding. What is still kept, is
    kept as the context around this one says, which may be a checkpoint or `save_on_cpu`. Inside
    such a context that is entered later, and inside another `Selective`, this one does nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repeatable: Any = WeakIdKeyDictionary()
        # What is saved inside the call of a function whose backward needs its result.
        self._pending: list[_Saved] | None = None

    def __enter__(self) -> Selective:
        self._around = _innermost_hooks()
        is_inner = isinstance(getattr(self._around[0], "__self__", None), Selective)
        self._hooks = None if is_inner else saved_tensors_hooks(self._pack, self._unpack)
        if self._hooks:
            self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._hooks:
            self._hooks.__exit__(*error)
        # The hooks refer to this object, which may refer to tensors. Without a cycle, these are
        # freed as soon as backward is done with them.
        del self._hooks

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function, and note how to repeat it."""
        del types
        kwargs = kwargs or {}
        is_cheap = func in _KEEP_INPUT or func in _KEEP_RESULT
        # What is saved for other hooks must not depend on this context: a checkpoint calls its
        # function again outside of it.
        is_own = is_cheap and _innermost_hooks()[0] == self._pack
        if not (is_own and args and torch.is_grad_enabled()):
            return func(*args, **kwargs)
        found = self._found(args[0])
        # If the input is not kept anyway, and cannot be computed again, the result is kept.
        if found is None and (func in _KEEP_RESULT or kwargs.get("inplace")):
            return func(*args, **kwargs)
        call = _Call(found and found.call, _repetition(func, args[1:], kwargs, args[0].device))
        base = args[0] if found is None else found.base
        if found is not None and _is_rectified(func, args[0], kwargs):
            run = partial(_Rectified.apply, args[0], func, kwargs)
        else:
            run = partial(func, *args, **kwargs)
        self._pending = pending = list[_Saved]()
        try:
            result = run()
        finally:
            self._pending = None
        kept = [one.base for one in pending]
        for one in pending:
            if one.base is result:
                call.uses += 1
                one.call, one.base = call, base
            self._keep(one)
        if func in _MULTIPLY_ADDS:
            call.run = _MultiplyAdd.of(func, args, kwargs, result, kept) or call.run
        self._repeatable[result] = _Repeatable(call, base, _versions(result, base))
        return result

    def _found(self, tensor: Tensor) -> _Repeatable | None:
        found: _Repeatable | None = self._repeatable.get(tensor)
        if found is None and tensor._base is not None and _is_all_of(tensor, tensor._base):
            found = self._repeatable.get(tensor._base)
        return found if found and found.versions == _versions(tensor, found.base) else None

    def _pack(self, tensor: Tensor) -> _Saved:
        view, found = None, self._found(tensor)
        whole = tensor._base
        # Strides do not describe a conjugate, or a view of another type.
        is_alike = whole is not None and whole.dtype == tensor.dtype and not tensor.is_conj()
        if found is None and whole is not None and is_alike:
            found = self._found(whole)
            view = (whole.stride(), tensor.shape, tensor.stride(), tensor.storage_offset())
        if found is None:
            saved = _Saved(tensor)
        else:
            found.call.uses += 1
            saved = _Saved(found.base, found.call, view)
        if self._pending is None:
            self._keep(saved)
        else:
            self._pending.append(saved)
        return saved

    def _keep(self, saved: _Saved) -> None:
        """Keep the base, which is still the tensor itself, as the context around this one says."""
        # The result of an operation would keep the operation alive, and that its result.
        kept: Any = saved.base.detach()
        # A context around this one may give back the same tensor, one from a repeated forward,
        # which has this attribute as well, or a copy, which has not.
        kept.saved_versions = _versions(kept)
        saved.base = self._around[0](kept) if self._around[0] else kept

    def _unpack(self, saved: _Saved) -> Tensor:
        base: Tensor = self._around[1](saved.base) if self._around[1] else saved.base
        _require_unmodified(getattr(base, "saved_versions", _versions(base)), base)
        if saved.call is None:
            return base
        saved.call.uses -= 1
        with torch.no_grad():
            result = saved.call.result(base).detach()
        if saved.view is None:
            return result
        strides, *view = saved.view
        # Hooks around this context may have given back the base in another memory layout.
        if result.stride() != strides:
            result = result.new_empty_strided(result.shape, strides).copy_(result)
        return result.as_strided(*view)


def _innermost_hooks() -> tuple[Any, Any]:
    """The hooks that pack and unpack what is saved now, or None and None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) or (None, None)


def _is_all_of(view: Tensor, base: Tensor) -> bool:
    """True if a view shows its base as it is."""
    if view.dtype != base.dtype or view.is_conj() != base.is_conj():
        return False
    return view.shape == base.shape and view.stride() == base.stride()


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    # Tensors of inference mode have no version.
    return tuple(0 if one.is_inference() else one._version for one in tensors)


def _require_unmodified(versions: tuple[int, ...], *tensors: Tensor) -> None:
    if versions != _versions(*tensors):
        raise RuntimeError(
            "a tensor that backward needs has been modified by an inplace operation; leave its "
            "module out of the plan's segments"
        )


def _is_transformed() -> bool:
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def _is_rectified(func: Any, input_: Tensor, kwargs: dict[str, Any]) -> bool:
    """True for ReLU, and for leaky ReLU if its result has the sign of its input."""
    # After a change of a view, backward of a function of ours would run twice if it has a graph:
    # for the view and for its base. A checkpoint gives back what is saved only once.
    if (kwargs.get("inplace") and input_._base is not None) or _is_transformed():
        return False
    slope = kwargs.get("negative_slope", 0)
    return func is functional.relu or (func is functional.leaky_relu and slope > 0)


def _repetition(
    func: Any, args: Any, kwargs: dict[str, Any], device: torch.device
) -> Callable[[Tensor], Tensor]:
    """A function that repeats a call for its first argument, as under the present autocast."""
    kind = device.type
    autocast = torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
    )
    if func in _UPDATING:
        bound = signature(func).bind(None, *args, **kwargs)
        bound.apply_defaults()
        args, kwargs = (), {k: v for k, v in bound.arguments.items() if k != "input"}
        if kwargs[_UPDATING[func]]:
            kwargs |= {"running_mean": None, "running_var": None}
        else:
            # Updates of the statistics do not change their version.
            statistics = {k: v for k, v in kwargs.items() if k.startswith("running")}
            kwargs |= tree_map_only(Tensor, torch.clone, statistics)
    kwargs = {k: v for k, v in kwargs.items() if k != "inplace"}
    args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
    others = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    versions = _versions(*others)

    def run(first: Tensor) -> Tensor:
        _require_unmodified(versions, *others)
        with autocast:
            result: Tensor = func(first, *args, **kwargs)
        return result

    return run


@dataclass(frozen=True, slots=True)
class _MultiplyAdd:
    """Repeats a normalisation by the moments that it has kept for its backward.

    Args:
        mean: of each group of channels, of one sample or of the whole batch, (samples or 1, groups,
            1).
        rstd: the reciprocal deviation, as `mean`.
        weight: of each channel, or None.
        bias: of each channel, or None.
        versions: of the weight and the bias, as they were.
        like: shape, strides and dtype of the result.
        is_flat: True: as a batch norm by given statistics, of all channels of all samples.
    """

    mean: Tensor
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None
    versions: tuple[int, ...]
    like: tuple[torch.Size, tuple[int, ...], torch.dtype]
    is_flat: bool

    @classmethod
    def of(
        cls, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor, kept: list[Tensor]
    ) -> _MultiplyAdd | None:
        """That of a call, which has kept these tensors; None if it saves no time, or has none."""
        input_, is_on_cpu = args[0], result.device.type == _HOST
        if is_on_cpu and result.numel() < _LEAST_ELEMENTS:
            return None
        node = result.grad_fn
        if func is functional.instance_norm and node is not None:
            node = node.next_functions[0][0]  # its result is a view of that of a batch norm
        if node is None or node.name() not in _KEEP_MOMENTS or _is_transformed():
            return None
        mean, rstd = [one.detach() for one in kept if one.is_floating_point()][-2:]
        # In evaluation there are none, and those of half precision are too rough.
        if not mean.numel() or mean.dtype not in (torch.float32, torch.float64):
            return None
        place = _MULTIPLY_ADDS[func]
        given = [*args[place : place + 2], None, None]
        weight, bias = kwargs.get("weight", given[0]), kwargs.get("bias", given[1])
        rows = 1 if func is functional.batch_norm else len(input_)
        # The result must have the strides that it had, because on these depends in which layout
        # torch computes what follows.
        is_alike = input_.dtype == result.dtype and input_.stride() == result.stride()
        is_flat = is_alike and (rows == 1 or input_.is_contiguous())
        if place == _OF_GROUPS:
            # On a CPU, such a group norm reads its input from memory only once, too.
            if is_on_cpu and is_flat:
                return None
            is_flat = False
        # A multiply-add of several dtypes copies its operands on a CPU. On a GPU, other norms
        # subtract the mean first, so that nothing is left of a channel without deviation.
        pays = input_.dtype == result.dtype == mean.dtype if is_on_cpu else place == _OF_GROUPS
        if not (is_flat or pays):
            return None
        return cls(
            mean.view(rows, -1, 1),
            rstd.view(rows, -1, 1),
            None if weight is None else weight.detach(),
            None if bias is None else bias.detach(),
            _versions(*(one for one in (weight, bias) if one is not None)),
            (result.shape, result.stride(), result.dtype),
            is_flat,
        )

    def __call__(self, input_: Tensor) -> Tensor:
        """The normalisation of an input."""
        shape, strides, dtype = self.like
        rows, groups, _ = self.mean.shape
        _require_unmodified(self.versions, *(b for b in (self.weight, self.bias) if b is not None))
        with torch.autocast(input_.device.type, enabled=False):
            each = rows, groups, shape[1] // groups
            mean, factor = self.mean.expand(each), self.rstd.expand(each)
            if self.weight is not None:
                factor = factor * self.weight.view(groups, -1)
            if self.is_flat and input_.stride() == strides:
                mean, factor = mean.reshape(-1), factor.reshape(-1)
                bias = None if self.bias is None else self.bias.to(mean.dtype).repeat(rows)
                flat = input_ if rows == 1 else input_.view(1, rows * shape[1], *shape[2:])
                given = factor, bias, mean, torch.ones_like(mean)
                return torch.batch_norm(flat, *given, False, 0.0, 0.0, False).view(shape)
            if self.bias is None:
                addend = -mean * factor
            else:
                addend = torch.addcmul(self.bias.view(groups, -1), mean, factor, value=-1)
            form = (rows, shape[1], *[1] * len(shape[2:]))
            place = input_.new_empty_strided(shape, strides, dtype=dtype)
            return torch.addcmul(addend.reshape(form), input_, factor.reshape(form), out=place)
