"""Apply a plan: swap the convolutions of a model, or let aten's operators follow the plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import nn
from torch.nn.utils import parametrize

from ucudnn import nn as planned_nn
from ucudnn.config import Config, settings_here
from ucudnn.errors import PlanError, warn
from ucudnn.execution.channels_last import lay_out_, restore_layout_
from ucudnn.execution.compiling import compile_, original_of, untraced
from ucudnn.execution.micro_batching import hooks_of, require_modules, segment_, unsegment_
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Layer, Runner, is_followed
from ucudnn.plan import KernelPlan, Plan
from ucudnn.segment import WHOLE, compiled_as_told

Model = TypeVar("Model", bound=nn.Module)
# To swap a layer is to change its class to the planned class of the same name. Only layers of
# exactly these classes are swapped: a subclass may have its own forward, which would be lost.
_PLANNED_BY_TORCH: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: planned_nn.Conv1d,
    nn.Conv2d: planned_nn.Conv2d,
    nn.Conv3d: planned_nn.Conv3d,
    nn.ConvTranspose1d: planned_nn.ConvTranspose1d,
    nn.ConvTranspose2d: planned_nn.ConvTranspose2d,
    nn.ConvTranspose3d: planned_nn.ConvTranspose3d,
}
_TORCH_BY_PLANNED = {planned: torch for torch, planned in _PLANNED_BY_TORCH.items()}
_SWAPPABLE = {*_PLANNED_BY_TORCH, *_TORCH_BY_PLANNED}
# Attributes that must not be copied from class to class, because Python makes them for each class.
_SLOTS = ("__dict__", "__weakref__")


@dataclass(frozen=True, slots=True, repr=False)
class Conversion:
    """What `convert_` did with each layer of a model.

    Args:
        model: the model that was converted in place.
        plan: the plan that `convert_` was given.
        swapped: names of the layers that follow the plan from now on.
        left: names of the layers that stay torch's, because their plan is torch's own convolution.
        unplanned: names of the convolution layers that the plan does not cover; all convolution
            layers, if the plan is for another device.
        not_swappable: names of modules that the plan covers, but whose class is not one of
            torch.nn's convolutions: modules that call a function, subclasses and parametrized
            modules. They follow the plan inside `ucudnn.installed(plan)`.
        segments: names of the modules that run in micro-batches or are recomputed.
    """

    model: nn.Module
    plan: Plan
    swapped: tuple[str, ...]
    left: tuple[str, ...]
    unplanned: tuple[str, ...]
    not_swappable: tuple[str, ...]
    segments: tuple[str, ...] = ()

    def __repr__(self) -> str:
        # The generated `repr` would print the whole model and the whole plan.
        return f"<Conversion of {type(self.model).__name__}: {self}>"

    def __str__(self) -> str:
        text = (
            f"{len(self.swapped)} layers follow the plan, {len(self.left)} stay torch's own by "
            f"plan, {len(self.unplanned)} are not planned, {len(self.not_swappable)} are planned "
            f"but not swappable"
        )
        if self.plan.compiles and not self.plan.kernels:
            text = "convolutions are left to the compiler"
        if self.segments:
            text += f"; {len(self.segments)} modules run in micro-batches or are recomputed"
        if self.plan.compiled is not None:
            text += f"; the model is {compiled_as_told(self.plan.compiled)}"
        return text


def convert_(
    model: nn.Module,
    plan: Plan | str | os.PathLike[str],
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    parameters: bool = True,
) -> Conversion:
    """Make the torch.nn convolutions of a model follow a plan, in place.

    The modules, their parameters, names, hooks and modes stay the same objects; only the class of a
    convolution changes. A layer keeps or gets back torch's class if the plan chooses torch's own
    convolution for all its passes and batches. Modules that the plan lists as segments run in
    micro-batches, or are recomputed in backward, from now on; the gradients are those of the whole
    batch, up to rounding.

    A plan for channels_last (`plan.memory_format`) converts the whole model to that layout:
    parameters, buffers, gradients and the state of optimisers keep their values and get other
    strides. The inputs of the model are converted in its forward. If tensors share memory, as by
    `share_memory` or by weights tied through `.data`, all tensors keep their strides, and each
    convolution converts its operands instead; a warning says so.

    A plan that compiles (`plan.compiled`) has the whole model compiled when it is called next, and
    for each new size of its inputs. Copies of the model are not compiled; convert them, too.

    Planned convolutions whose class cannot be changed are listed in the result and in a warning. In
    code compiled by torch.compile, a swapped layer is torch's own convolution again; it follows the
    plan only inside `ucudnn.installed(plan)`. If the plan is for another device, a warning says
    so, and the model is not changed.

    Args:
        model: any module, also a convolution itself.
        plan: a plan for this model, or for layers of the same shapes; or the path of its file.
        filter_fn: called with (module, name); False leaves the layer out.
        parameters: False leaves the strides of parameters as they are, for FSDP2 and other
            libraries that need contiguous parameters. With a plan for channels_last, each
            convolution then converts its input.

    Raises:
        PlanError: the plan covers no convolution of the model and has no segments, or has segments
            that are no modules of the model, or its file cannot be read. With `unplanned="error"`
            also if the plan does not hold on this machine, or if a convolution of the model has no
            plan or cannot be swapped.
    """
    plan = _loaded(plan)
    config = settings_here(plan.config)
    # The wrapper of torch.compile is left out, because a plan has the names of the layers inside
    # it.
    original = original_of(model)
    found = _find(original, plan, filter_fn or (lambda *_: True))
    if not is_followed(plan, config):
        return Conversion(model, plan, (), (), tuple(found.convolutions), ())
    _require_some(plan, found)
    require_modules(original, plan.segments)
    if plan.compiled is not None and any(hooks_of(model)) and original is not model:
        raise PlanError(
            "the plan compiles the model, and would not call the hooks of the wrapper that "
            "torch.compile returned; register them on the module inside, or remove them"
        )
    if config.unplanned == "error":
        _require_all(found)
    _warn_of(found.otherwise)
    changed, runner = _changed_layers(plan, config), Runner(plan, config)
    # Nothing was changed so far. The layout is changed first: if memory does not suffice for that,
    # the call fails and the model is as it was. A plan with the layout "keep" undoes the layout
    # that an earlier plan may have given to the model.
    restore_layout_(original) if plan.memory_format == "keep" else lay_out_(original, parameters)
    segment_(original, plan.segments)
    compile_(model, plan.compiled)
    swapped, left = _swap(found, changed, runner)
    segments = tuple(one.module for one in plan.segments)
    return Conversion(model, plan, swapped, left, found.unplanned, found.otherwise, segments)


class _Found(NamedTuple):
    """Convolutions of a model, by what a plan can do with them."""

    convolutions: Mapping[str, Any]  # modules that can be swapped, by name
    matched: Mapping[str, Layer]  # the `Layer` of each of these modules that is planned, by name
    unplanned: tuple[str, ...]  # names of the modules in `convolutions` without a plan
    otherwise: tuple[str, ...]  # names of planned modules that cannot be swapped


def _find(model: nn.Module, plan: Plan, wanted: Callable[[nn.Module, str], bool]) -> _Found:
    modules: dict[str, Any] = dict(model.named_modules())
    convolutions = {
        name: module
        for name, module in modules.items()
        if type(module) in _SWAPPABLE and wanted(module, name)
    }
    planned = {Layer.of(kernel.problem) for kernel in plan.kernels}
    layers = {name: planned_nn.layer_of(module) for name, module in convolutions.items()}
    matched = {name: layer for name, layer in layers.items() if layer in planned}
    unplanned = tuple(name for name in convolutions if name not in matched)
    # Layers that were left out by `filter_fn` were left out on purpose, so they are not reported.
    otherwise = tuple(
        name for name in _planned_otherwise(modules, plan, matched) if wanted(modules[name], name)
    )
    return _Found(convolutions, matched, unplanned, otherwise)


def _loaded(plan: Plan | str | os.PathLike[str]) -> Plan:
    return Plan.load(plan) if isinstance(plan, (str, os.PathLike)) else plan


def _changed_layers(plan: Plan, config: Config) -> set[Layer]:
    # With unplanned="error" all planned layers are swapped, also those that the plan leaves to
    # torch. A layer that keeps torch's class would compute shapes that have no plan instead of
    # raising an error.
    return {
        Layer.of(kernel.problem)
        for kernel in plan.kernels
        if config.unplanned == "error" or not _is_torchs_own(kernel)
    }


def _swap(
    found: _Found, changed: Collection[Layer], runner: Runner
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Let matched convolutions follow a plan; return the names swapped, and those left to torch."""
    swapped, left = [], []
    for name, layer in found.matched.items():
        module = found.convolutions[name]
        # An earlier plan may have swapped a layer that this plan leaves to torch. It is swapped
        # back.
        if layer not in changed:
            _unswap(module)
            left.append(name)
        else:
            # Only `__class__` changes, so that references to the module, its hooks and its
            # parameters stay valid.
            planned_nn.follow(module, runner)
            # A module that is swapped already keeps its class and follows the new plan.
            module.__class__ = _PLANNED_BY_TORCH.get(type(module), type(module))
            swapped.append(name)
    return tuple(swapped), tuple(left)


def _require_some(plan: Plan, found: _Found) -> None:
    """Refuse a plan that covers no convolution of the model, unless it divides the step.

    A plan without kernels is for any model, if there was no time to make one.
    """
    is_empty = plan.left_out and not plan.kernels
    if not found.matched and plan.division == WHOLE and not is_empty:
        listed = _listed(found.otherwise)
        raise PlanError(
            f"the plan of {len(plan.kernels)} kernels covers none of this model's "
            f"{len(found.unplanned)} torch.nn convolutions; tune this model and use that plan"
            + (f", or ucudnn.installed(plan) for {listed}" if listed else "")
        )


def _require_all(found: _Found) -> None:
    if found.unplanned:
        raise PlanError(
            f"unplanned='error' runs only what is planned, and these convolutions are not: "
            f"{_listed(found.unplanned)}; tune this model and use that plan, or leave them out by "
            f"filter_fn"
        )
    if found.otherwise:
        raise PlanError(
            f"unplanned='error' runs only what is planned, and these cannot be swapped: "
            f"{_listed(found.otherwise)}; use ucudnn.installed(plan), or leave them out by "
            f"filter_fn"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name or "the model itself" for name in names)


def _warn_of(otherwise: Sequence[str]) -> None:
    if otherwise:
        warn(
            f"planned, but no torch.nn convolution that could be swapped: {_listed(otherwise)}; "
            f"torch's own computes them; use ucudnn.installed(plan), or leave them out by "
            f"filter_fn"
        )


def revert_(model: Model) -> Model:
    """Turn every planned convolution of a model back into torch.nn's, in place.

    Tensors whose strides `convert_` changed get their old strides back, no module runs in
    micro-batches or is recomputed any more, and the model is compiled only if its user did.

    >>> revert_(nn.Sequential(planned_nn.Conv2d(3, 8, 3)))
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
    )
    """
    original = original_of(model)
    compile_(model, None)
    restore_layout_(original)
    unsegment_(original)
    _unswap(original)
    return model


def _unswap(model: nn.Module) -> None:
    for module in model.modules():
        planned = next((base for base in type(module).__mro__ if base in _TORCH_BY_PLANNED), None)
        if planned is type(module):
            module.__class__ = _TORCH_BY_PLANNED[planned]
        elif planned is not None and parametrize.is_parametrized(module):
            # `torch.nn.utils.parametrize` has made the class of this module, as a subclass of the
            # planned class. Copies of the module share that class, so it must not be changed, and
            # the module gets a new class instead.
            own = {name: value for name, value in vars(type(module)).items() if name not in _SLOTS}
            name, torchs = type(module).__name__, _TORCH_BY_PLANNED[planned]
            module.__class__ = type(name, (torchs,), own)
        else:
            continue
        planned_nn.unfollow(module)


def tune_(
    model: nn.Module,
    example_inputs: Any,
    config: Config | None = None,
    on_progress: Callable[[Any], None] | None = None,
    *,
    real: bool = False,
) -> Conversion:
    """Tune a model and convert it in place: `tune` and then `convert_`.

    The arguments are those of `tune`; `on_progress` gets a `ucudnn.types.Progress`.
    """
    # Imported only here, because a process that only follows plans need not load the tuner.
    from ucudnn.steps.tune import tune

    return convert_(model, tune(model, example_inputs, config, on_progress, real=real))


def _is_torchs_own(kernel: KernelPlan) -> bool:
    """True if a kernel's plan is torch's own convolution for every batch that it covers."""
    # All batches are tested: the last batch of an epoch is often smaller, and may be split even if
    # the largest is not.
    batches = range(1, kernel.problem.batch + 1)
    return all(kernel.split(batch).is_default for batch in batches if kernel.covers(batch))


def _planned_otherwise(
    modules: Mapping[str, nn.Module], plan: Plan, matched: Mapping[str, Layer]
) -> Iterator[str]:
    """Names of modules that cannot be swapped, although the plan has their name or their shape."""
    layers = {Layer.of(kernel.problem) for kernel in plan.kernels}
    named: set[str] = set()
    for kernel in plan.kernels:
        # If layers of this model have the kernel's shape, but no name of a matched layer is among
        # the kernel's, the plan was made for another model, and its names mean nothing here.
        is_known = any(name in matched for name in kernel.layers)
        if is_known or Layer.of(kernel.problem) not in matched.values():
            named.update(() if kernel.is_default else kernel.layers)
    for name, module in modules.items():
        # `fits` is also true for modules of a subclass, which cannot be swapped.
        fits = isinstance(module, nn.modules.conv._ConvNd) and planned_nn.layer_of(module) in layers
        if (name in named or fits) and type(module) not in _SWAPPABLE:
            yield name


@untraced
def installed(plan: Plan | str | os.PathLike[str]) -> Installation:
    """Let convolutions of this process follow a plan: modules, functional calls, compiled graphs.

    The plan acts inside a `with` statement, in all threads, including autograd's. If several plans
    are installed for one kind of device, only the last one acts. Convolutions not in the plan are
    computed by torch. A CUDA graph replays what it captured, whether or not a plan is installed. No
    model is changed: if the plan is for channels_last (`plan.memory_format`) and a model is not in
    that layout, one warning says so. From the first installation until the process ends, each call
    of a convolution takes some microseconds more. The first installation must not happen while
    another thread computes convolutions. If a plan is to serve a compiled model, tune the compiled
    model: then the plan is judged by times of compiled steps.

    >>> import tempfile, torch, ucudnn
    >>> layer, x = torch.nn.Conv2d(3, 8, 3), torch.ones(2, 3, 9, 9)
    >>> config = ucudnn.Config(policy="undivided", cache=tempfile.mkdtemp())
    >>> with installed(ucudnn.tune(layer, x, config)):
    ...     y = torch.nn.functional.conv2d(x, layer.weight, layer.bias)
    >>> torch.allclose(y, layer(x), atol=1e-5)
    True

    Args:
        plan: a plan made for this device, or the path of its file.

    Raises:
        PlanError: the plan's file cannot be read. With `unplanned="error"` also if the plan does
            not hold on this machine, and later at each convolution that has no plan.
    """
    plan = _loaded(plan)
    _warn_of_division(plan)
    config = settings_here(plan.config)
    followed = plan if is_followed(plan, config) else None
    return Installation(plan.device.type, Runner(followed, config))


def _warn_of_division(plan: Plan) -> None:
    """Warn if a plan has segments or a loop's micro-batch, because `installed` uses neither."""
    if plan.division != WHOLE:
        warn(
            "this plan keeps its memory by modules in micro-batches or by the training loop, and "
            "no module is changed here; use ucudnn.convert_(model, plan) and plan.micro_batches"
        )
