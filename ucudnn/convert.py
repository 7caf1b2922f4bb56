"""Swap the convolutions of a model for planned ones, in place, and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ucudnn import nn as planned_nn
from ucudnn.backends import open_backend
from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.ops import Runner
from ucudnn.plan import KernelPlan, Plan
from ucudnn.tuner import Progress, tune

_PLANNED_BY_TORCH: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: planned_nn.Conv1d,
    nn.Conv2d: planned_nn.Conv2d,
    nn.Conv3d: planned_nn.Conv3d,
}
_TORCH_BY_PLANNED = {planned: torch for torch, planned in _PLANNED_BY_TORCH.items()}


@dataclass(frozen=True, slots=True)
class Conversion:
    """What `convert_` did to a model.

    Args:
        model: the model that was converted in place.
        plan: the plan it follows now.
        swapped: names of the layers that follow the plan.
        left: names of the layers left as torch's, whose plan is torch's own convolution.
        unplanned: names of the convolution layers that the plan does not cover.
        not_swappable: planned layers that are no torch.nn convolution: functional calls, subclasses
            and parametrized modules.
    """

    model: nn.Module
    plan: Plan
    swapped: tuple[str, ...]
    left: tuple[str, ...]
    unplanned: tuple[str, ...]
    not_swappable: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{len(self.swapped)} layers follow the plan, {len(self.left)} stay torch's own by "
            f"plan, {len(self.unplanned)} are not planned, {len(self.not_swappable)} are planned "
            f"but not swappable"
        )


def convert_(
    model: nn.Module, plan: Plan, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> Conversion:
    """Make the torch.nn convolutions of a model follow a plan, in place.

    The modules, their parameters, names, hooks and modes stay the same objects; only the class of
    a module changes. A layer all of whose plans are torch's own convolution is left as it is.

    Args:
        model: any module, also a convolution itself.
        plan: made for this model, or for layers of the same shapes.
        filter_fn: called with (module, name); False leaves the layer out.

    Raises:
        PlanError: the plan was made for another device, or covers no convolution of the model.
    """
    _require_same_device(plan)
    runner = Runner(plan)
    swapped: dict[str, nn.Module] = {}
    left: dict[str, nn.Module] = {}
    unplanned = []
    for name, module in _convolutions(model):
        if filter_fn is not None and not filter_fn(module, name):
            continue
        kernels = [kernel for kernel in plan.kernels if _is_kernel_of(kernel, module)]
        if not kernels:
            unplanned.append(name)
        elif all(kernel.is_default for kernel in kernels):
            left[name] = module
        else:
            swapped[name] = module
    if not swapped and not left:
        raise PlanError(
            f"the plan of {len(plan.kernels)} kernels covers none of this model's "
            f"{len(unplanned)} torch.nn convolutions; tune this model and use that plan"
        )
    # nothing was changed so far, and nothing fails from here
    for module in left.values():
        revert_(module)
    for module in swapped.values():
        # __class__ alone changes: whoever holds the module, its hooks and parameters keeps it
        module._ucudnn_runner = runner  # type: ignore[assignment]
        module.__class__ = _PLANNED_BY_TORCH.get(type(module), type(module))
    seen = {*swapped, *left, *unplanned}
    planned = dict.fromkeys(name for kernel in plan.kernels for name in kernel.layers)
    modules = dict(model.named_modules())
    not_swappable = [name for name in planned if name not in seen and name in modules]
    return Conversion(
        model, plan, tuple(swapped), tuple(left), tuple(unplanned), tuple(not_swappable)
    )


def revert_(model: nn.Module) -> nn.Module:
    """Turn every planned convolution of a model back into torch.nn's, in place.

    >>> revert_(nn.Sequential(planned_nn.Conv2d(3, 8, 3)))
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
    )
    """
    for module in model.modules():
        if type(module) in _TORCH_BY_PLANNED:
            module.__class__ = _TORCH_BY_PLANNED[type(module)]
            del module._ucudnn_runner
    return model


def tune_(
    model: nn.Module,
    example_inputs: Any,
    config: Config | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Conversion:
    """Tune a model and convert it in place: `tune` and then `convert_`."""
    return convert_(model, tune(model, example_inputs, config, on_progress))


def _convolutions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module) in _PLANNED_BY_TORCH or type(module) in _TORCH_BY_PLANNED:
            yield name, module


def _is_kernel_of(kernel: KernelPlan, module: Any) -> bool:
    """Whether a kernel could be a call of this module, whose input size is not known yet."""
    problem = kernel.problem
    _, padding = planned_nn.split_padding(module)
    return (
        problem.rank == len(module.kernel_size)
        and problem.in_channels == module.in_channels
        and problem.out_channels == module.out_channels
        and problem.kernel_size == module.kernel_size
        and problem.stride == module.stride
        and problem.dilation == module.dilation
        and problem.groups == module.groups
        and problem.padding == tuple((amount, amount) for amount in padding)
    )


def _require_same_device(plan: Plan) -> None:
    backend = open_backend(plan.backend)
    device, software = backend.device(), backend.software()
    threads = backend.conditions().threads
    if plan.device != device:
        raise PlanError(
            f"the plan was made for {plan.device}, this process runs on {device}; tune here, "
            f"or load a plan made for this device"
        )
    if plan.software != software:
        warnings.warn(
            f"the plan was made with {plan.software}, this process runs {software}: its results "
            f"are right, its times may not be; tune again to renew it",
            UserWarning,
            stacklevel=3,
        )
    if plan.conditions.threads != threads:
        warnings.warn(
            f"the plan was made for {plan.conditions.threads} threads, this process has {threads}: "
            f"its results are right, its times may not be; set torch.set_num_threads or tune again",
            UserWarning,
            stacklevel=3,
        )
