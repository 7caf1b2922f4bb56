"""Plans in the trainers of PyTorch Lightning and Transformers: the batch stays what it is.

A plan with a loop asks for micro-batches. The trainer's own step runs once on each of them, so the
number of steps, schedules and logs are those of the whole batch, and so are the gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ucudnn.convert import convert_, revert_
from ucudnn.errors import ConfigError, quoted
from ucudnn.plan import Plan
from ucudnn.segment import MicroBatch

Count = Callable[[Any], float]
_log = logging.getLogger(__name__)


def follow(trainer: Any, plan: Plan, count: Count | None = None) -> None:
    """Let a trainer follow a plan; call it once, before training.

    >>> follow(object(), None)
    Traceback (most recent call last):
    ucudnn.errors.ConfigError: trainer must be one of PyTorch Lightning or Transformers, got object

    Args:
        trainer: a `Trainer` of PyTorch Lightning or of Transformers.
        plan: a plan of the model, or of a module in it. Lightning's module is converted when it is
            given to the trainer, and reverted after training.
        count: how much a loss is a mean over: called with a batch or a part of it, it returns for
            example the number of tokens or pixels whose label counts. None: the number of samples;
            in Transformers, a model that divides by the number of items of the batch does so still.

    Raises:
        ConfigError: this is no trainer of these libraries, the plan is of another model, or it
            compiles what the trainer compiles itself.
    """
    libraries = {kind.__module__.partition(".")[0] for kind in type(trainer).__mro__}
    if libraries & {"pytorch_lightning", "lightning"}:
        trainer.callbacks.append(_lightning(trainer, plan, count))
    elif "transformers" in libraries:
        if plan.compiles and trainer.args.torch_compile:
            raise ConfigError(
                "the plan compiles the model itself, within its memory; leave out "
                "torch_compile=True, which would compile it once more, without that"
            )
        _say(convert_(_planned(trainer.model, plan), plan), plan)
        if plan.micro_batch is not None:
            _divide(trainer, plan, count)
    else:
        raise ConfigError(
            f"trainer must be one of PyTorch Lightning or Transformers, got "
            f"{type(trainer).__name__}"
        )


def _say(conversion: object, plan: Plan) -> None:
    loop = plan.micro_batch and f"; each step runs on micro-batches of {plan.micro_batch} samples"
    _log.warning("ucudnn: %s%s", conversion, loop or "")


def _planned(model: nn.Module, plan: Plan) -> nn.Module:
    """The model, or the first of its children, that has the modules of the plan."""
    divided = {one.module.partition("[")[0] for one in plan.segments}
    layers = {name for kernel in plan.kernels for name in kernel.layers}
    modules = [model, *model.children()]
    if not (divided or layers):  # it compiles the model, and says of which class that is
        of = plan.origin and plan.origin.model
        return next((one for one in modules if type(one).__name__ == of), model)
    for module in modules:
        names = {name for name, _ in module.named_modules()}
        if divided <= names and (layers & names or not layers):
            return module
    raise ConfigError(
        f"the plan must be of {type(model).__name__} or of a module in it, and none of them has "
        f"{quoted(min(divided or layers))}; use the plan of this model"
    )


def _parts(batch: Any, plan: Plan, count: Count | None) -> list[MicroBatch]:
    """The micro-batches of a batch, each with its weight in the mean over the batch."""
    # The loaders of torch make lists of what a sample consists of.
    batch = tuple(batch) if isinstance(batch, list) else batch
    parts = [*plan.micro_batches(batch)]
    if count is not None:
        whole = count(batch)
        for part in parts:
            part.weight = count(part[0]) / whole if whole else 0.0
    return parts


def _divide(trainer: Any, plan: Plan, count: Count | None) -> None:
    """Let a trainer of Transformers run its step on each micro-batch of a batch."""
    whole_step, whole_loss, weight = trainer.training_step, trainer.compute_loss, 1.0
    divides: list[bool] = []  # whether the model divides its loss by the items of the batch

    def loss(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        items = kwargs.get("num_items_in_batch")
        if items is not None and not divides:
            divides.append(_divides(partial(whole_loss, model, inputs), items))
        found = whole_loss(model, inputs, *args, **kwargs)
        if items is not None and count is None and divides[0]:
            return found  # a sum, divided by the items of all micro-batches
        return (found[0] * weight, *found[1:]) if isinstance(found, tuple) else found * weight

    def step(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal weight
        losses = []
        parts = _parts(dict(inputs), plan, count)
        for number, part in enumerate(parts, 1):
            weight = part.weight
            is_last = number == len(parts)
            with nullcontext() if is_last else trainer.accelerator.no_sync(model):
                losses.append(whole_step(model, part[0], *args, **kwargs))
        weight = 1.0  # for evaluation
        return sum(losses)

    trainer.training_step, trainer.compute_loss = step, loss


def _divides(loss: Callable[..., Any], items: Any) -> bool:
    """True if a loss is divided by a number of items; many models take it and ignore it."""
    halves = []
    for number in (items, 2 * items):
        with torch.no_grad(), torch.random.fork_rng():
            halves.append(float(loss(num_items_in_batch=number)))
    return abs(halves[1] - halves[0] / 2) < abs(halves[1] - halves[0])


def _lightning(trainer: Any, plan: Plan, count: Count | None) -> Any:
    """A callback for Lightning; only a process that has imported Lightning makes it."""
    library = import_module(type(trainer).__module__.partition(".")[0])
    base = getattr(library, "Callback", None) or library.pytorch.Callback
    kind: Any = type("FollowPlan", (_LightningSteps, base), {})
    return kind(plan, count)


class _LightningSteps:
    """Runs the step of a module on the first micro-batch, and after its backward on the others.

    Lightning sets gradients to zero between forward and backward.
    """

    def __init__(self, plan: Plan, count: Count | None) -> None:
        self._plan, self._count = plan, count
        self._left: list[Callable[[], None]] = []
        self._sync: AbstractContextManager[object] = nullcontext()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Convert the module, before its optimisers are made."""
        if stage == "fit":
            planned = _planned(pl_module, self._plan)
            # Lightning has compiled it, or calls its `training_step` where it is called.
            if self._plan.compiles and planned is pl_module:
                raise ConfigError(
                    "the plan compiles the model, and Lightning's module calls more than one; plan "
                    "the network in it, and give that to the module uncompiled"
                )
            _say(convert_(planned, self._plan), self._plan)
            is_divided = self._plan.micro_batch is not None and pl_module.automatic_optimization
            if is_divided and "training_step" not in vars(trainer.strategy):
                step = trainer.strategy.training_step
                trainer.strategy.training_step = partial(self._step, trainer, step)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Revert the module, after training."""
        if stage == "fit":
            revert_(_planned(pl_module, self._plan))
            vars(trainer.strategy).pop("training_step", None)

    def _step(self, trainer: Any, step: Any, batch: Any, *args: Any) -> Any:
        first, *others = _parts(batch, self._plan, self._count)
        self._left = [partial(self._part, trainer, step, one, args) for one in others]
        if others:
            self._sync = getattr(trainer.strategy, "block_backward_sync", nullcontext)()
            self._sync.__enter__()
        return _weighed(step(first[0], *args), first.weight)

    def _part(self, trainer: Any, step: Any, part: MicroBatch, args: Any) -> None:
        result = _weighed(step(part[0], *args), part.weight)
        loss = result["loss"] if isinstance(result, dict) else result
        trainer.strategy.backward(loss / trainer.accumulate_grad_batches, None)

    def on_after_backward(self, *_: Any) -> None:
        """Run what is left of the batch; ranks exchange gradients in the last part."""
        left, self._left = self._left, []
        for number, run in enumerate(left, 1):
            if number == len(left):
                self._sync.__exit__(None, None, None)
            run()


def _weighed(result: Any, weight: float) -> Any:
    if isinstance(result, dict):
        return {**result, "loss": result["loss"] * weight}
    return None if result is None else result * weight
