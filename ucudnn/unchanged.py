"""What a script that runs unchanged does by UCUDNN_PLAN, UCUDNN_RECORD or UCUDNN_MEMORY_BUDGET.

Its convolutions follow a plan or are recorded from the start on. Modules can run in micro-batches
only once the script has made its model. So with segments, or a memory budget, the outermost module
is found when its first training forward begins, planned on a copy with these very inputs, and
converted in place; then that forward goes on.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from ucudnn import cache as caches
from ucudnn.backends.registry import identify
from ucudnn.config import Config, Startup, settings_here
from ucudnn.distributed.rendezvous import Rendezvous
from ucudnn.distributed.sharding import unsharded
from ucudnn.errors import PlanError, PlanFileError, UcudnnError, first_line
from ucudnn.execution.compiling import is_compiled, original_of, untraced
from ucudnn.execution.micro_batching import strip_
from ucudnn.execution.observers import Recorder
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Runner
from ucudnn.plan import Plan
from ucudnn.segment import WHOLE
from ucudnn.steps.profile import bytes_of, held_by
from ucudnn.system.lines import lines

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# Converts the outermost module, given the arguments of its forward; returns the plan, if any.
_Convert = Callable[[nn.Module, _Arguments], Plan | None]
# Installations that `follow_startup` has made in this process; they last until the process ends.
_started: list[Any] = []
# The most segments that are named.
_LISTED = 3
# Seconds that other ranks wait for the plan of the first.
_WAIT_S = 3600.0
# By these modules, a script plans its models itself. Then the variable is only a default of its
# settings.
_OWN_WAYS = ("ucudnn.convert", "ucudnn.steps.tune")


@untraced
def follow_startup(files: Startup) -> None:
    """Follow a plan, record convolutions, or wait for a model to plan, until this process ends.

    Whether the plan holds on this machine is not checked now, but at the first convolution that the
    plan may cover. This function runs while torch is imported, and a script sets its threads and
    picks its GPU only after that.
    """
    if _started:
        return
    if files.record is not None:
        _record(files.record)
    elif files.plan is not None:
        plan = Plan.load(files.plan)
        if plan.division == WHOLE:
            _install(plan)
        else:
            _started.append(_FirstStep(partial(_by_file, plan, files.plan)))
    elif files.memory_budget is not None:
        _started.append(_FirstStep(partial(_within, files.memory_budget)))


def _install(plan: Plan, module: nn.Module | None = None) -> None:
    """Let functional calls follow a plan, too.

    Compiled code has its convolutions in layouts of its own, which the plan does not cover.
    """
    if module is not None and is_compiled(module):
        return
    runner = Runner(plan, settings_here(plan.config), is_checked=False)
    _started.append(Installation(plan.device.type, runner).__enter__())


def _record(path: str) -> None:
    recorder = Recorder()
    kinds = [kind for kind in ("cpu", "cuda") if kind == "cpu" or torch.version.cuda]
    _started.extend(Installation(kind, recorder).__enter__() for kind in kinds)
    os.register_at_fork(after_in_child=recorder.clear)
    atexit.register(recorder.save, path)
    # A process that multiprocessing has forked runs no atexit handlers when it ends, but it runs
    # finalizers of multiprocessing. So its convolutions are saved by a finalizer.
    register_after_fork(recorder, lambda one: Finalize(None, one.save, (path,), exitpriority=0))


def _tell(sentence: str) -> None:
    sys.stderr.write(f"ucudnn: {sentence}\n")
    sys.stderr.flush()


@dataclass
class _FirstStep:
    """Finds the outermost module in its first training forward, and has it converted.

    When the second step begins, it is known whether steps call this module once, and no other.
    From then on only a model that comes later is looked at. It is planned, too, if the first one is
    gone by then.
    """

    convert: _Convert
    own_call: Callable[..., Any] = field(init=False)  # torch's `nn.Module.__call__`
    converted: nn.Module | None = None
    is_compiled: bool = False  # as the module is converted, so that steps need not look
    plan: Plan | None = None
    sizes: list[torch.Size] = field(default_factory=list)  # of the arguments it was planned for
    # The results of its first forward, and whether backward has reached them.
    results: list[ref[Tensor]] = field(default_factory=list)
    has_gone_back: bool = False
    settled: ref[nn.Module] | None = None  # the module, after its first step
    has_planned: bool = False
    has_told: bool = False
    inside: threading.local = field(default_factory=threading.local)  # is a call of a module

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        own_call = self.own_call = nn.Module.__call__
        inside = self.inside

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Dynamo takes the first test for true, and traces torch's own call.
            if is_compiling() or getattr(inside, "is_set", False):
                return own_call(module, *args, **kwargs)
            if not _is_training(module, args, kwargs) or _is_redirected(module):
                return own_call(module, *args, **kwargs)
            inside.is_set = True
            try:
                return self._outermost(module, (args, kwargs))
            finally:
                inside.is_set = False

        nn.Module.__call__ = call  # type: ignore[method-assign]

    def _end(self) -> None:
        nn.Module.__call__ = self.own_call  # type: ignore[method-assign]
        self._drop()

    def _drop(self) -> None:
        """From now on no reference keeps the model, or what it computes."""
        self.converted, self.plan, self.results = None, None, []

    def _outermost(self, module: nn.Module, arguments: _Arguments) -> Any:
        args, kwargs = arguments
        if self.settled is not None and not self._is_new(module):
            return self._called(module, arguments)
        if self.converted is None:
            if not self.has_planned and any(name in sys.modules for name in _OWN_WAYS):
                self._end()
                return module(*args, **kwargs)
            # Parameters get their sizes in this forward, and the next one is planned.
            if any(map(is_lazy, module.parameters())):
                return self.own_call(module, *args, **kwargs)
            self._convert(module, arguments)
        elif module is self.converted:
            self._second(module, arguments)
        elif module not in set(self.converted.modules()):
            self._give_up(f"{type(module).__name__} runs beside it in a step")
        result = self._called(module, arguments)
        if self.converted is not None and not self.results:
            self._watch(result)
        return result

    def _called(self, module: nn.Module, arguments: _Arguments) -> Any:
        """Call a module; if it is compiled, Dynamo finds torch's own call of modules."""
        args, kwargs = arguments
        if not self.is_compiled:
            return self.own_call(module, *args, **kwargs)
        call, nn.Module.__call__ = nn.Module.__call__, self.own_call  # type: ignore[method-assign]
        try:
            return self.own_call(module, *args, **kwargs)
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]

    def _is_new(self, module: nn.Module) -> bool:
        """True if a module is to be planned after another, which is gone."""
        assert self.settled is not None
        before = self.settled()
        if module is before:
            return False
        if before is not None and module not in set(before.modules()):
            gc.collect()  # it may be gone but for references in cycles
            before = self.settled()
            if before is not None and not self.has_told:
                self.has_told = True
                _tell(
                    f"{type(module).__name__} trains without a memory budget, beside "
                    f"{type(original_of(before)).__name__}, which was planned"
                )
        if before is None:
            self.settled, self.has_gone_back = None, False
            _uninstall()
        return before is None

    def _convert(self, module: nn.Module, arguments: _Arguments) -> None:
        # What runs meanwhile belongs to planning.
        self._end()
        self.has_planned = True
        self.plan = self.convert(module, arguments)
        if self.plan is not None:
            self._begin()
            self.converted, self.sizes = module, _sizes(arguments)
            self.is_compiled = is_compiled(module)

    def _watch(self, result: Any) -> None:
        def back(gradient: Tensor) -> None:
            del gradient
            self.has_gone_back = True

        tensors = [one for one in tree_leaves(result) if isinstance(one, Tensor) and one.grad_fn]
        for one in tensors:
            one.register_hook(back)
        self.results = [ref(one) for one in tensors]

    def _second(self, module: nn.Module, arguments: _Arguments) -> None:
        """The module is called again: in the next step, or once more in this one."""
        if not self.has_gone_back and any(one() is not None for one in self.results):
            self._give_up("a step calls it several times before its backward")
            return
        # The first forward may have been none of a step, such as one that finds sizes. And this
        # script may keep gradients during the next forward, which the first step did not have.
        is_other = not self.has_gone_back and _sizes(arguments) != self.sizes
        gradients = bytes_of([one.grad for one in module.parameters()])
        memory = self.plan.memory if self.plan is not None else None
        if memory is not None:
            is_other |= memory.plan_peak_bytes + gradients > memory.budget_bytes
        if is_other:
            _tell("this step differs from the first: other inputs, or gradients of the one before")
            _revert(module)
            self._convert(module, arguments)
        self.settled = ref(module)
        self._drop()

    def _give_up(self, reason: str) -> None:
        assert self.converted is not None
        name = type(original_of(self.converted)).__name__
        _revert(self.converted)
        self._end()
        _tell(
            f"no memory budget is kept, training goes on by torch: {name} was planned, and "
            f"{reason}; make one module of it whose forward runs once in a step"
        )


def _revert(module: nn.Module) -> None:
    from ucudnn.convert import revert_

    revert_(module)
    _uninstall()


def _uninstall() -> None:
    while _started and isinstance(_started[-1], Installation):
        _started.pop().__exit__()


def _is_redirected(module: nn.Module) -> bool:
    """True for Lightning's module in the moment in which its forward stands for another method."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    kinds = {kind.__name__ for kind in type(inner).__mro__}
    return "LightningModule" in kinds and "forward" in vars(inner)


def _is_training(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """True if this is a call of a module that has something to learn, on real tensors."""
    if not (module.training and torch.is_grad_enabled()) or torch._C._get_tracing_state():
        return False
    if not any(one.requires_grad for one in module.parameters()):
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False  # the parameters are those of torch.func
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    is_real = not torch._C._len_torch_dispatch_stack()
    is_real &= not any(is_traceable_wrapper_subclass(one) or one.is_meta for one in tensors)
    return is_real and bool(tensors)


def _sizes(arguments: _Arguments) -> list[torch.Size]:
    return [one.shape for one in tree_leaves(arguments) if isinstance(one, Tensor)]


def _by_file(plan: Plan, path: str, module: nn.Module, arguments: _Arguments) -> Plan:
    """Convert a module by the plan of a file; end the process if it is of another model."""
    del arguments
    from ucudnn.convert import convert_

    traced, kind = plan.origin.model if plan.origin else "", type(original_of(module)).__name__
    # The name on a command line has a colon.
    reason = f"it is of {traced}" if traced not in ("", kind) and ":" not in traced else ""
    try:
        if not reason:
            done = convert_(module, plan)
            _install(plan, module)
    except PlanError as error:
        reason = str(error)
    if reason:
        _tell(
            f"the plan {path} does not fit {kind}, the outermost module of this script: {reason}; "
            f"add these lines to the script, with its own name of the model that was tuned:\n"
            f"    import ucudnn\n    ucudnn.convert_(model, {path!r})"
        )
        sys.exit(2)
    _tell(f"{kind} follows {path}: {done}")
    return plan


def _within(budget: str, module: nn.Module, arguments: _Arguments) -> Plan | None:
    """Plan a module within a memory budget, and convert it; end the process if none fits.

    None: no step of this module can be planned here.
    """
    from ucudnn.convert import convert_

    name = type(original_of(module)).__name__
    with unsharded(module):
        plan, told = _agreed(name, budget, module, arguments)
    if isinstance(plan, UcudnnError):
        is_refused = isinstance(plan, PlanError) and plan.smallest_bytes is not None
        if _is_first():
            goes_on = "" if is_refused else "; training goes on by torch, without a budget"
            _tell(f"{name} cannot be planned within {budget}: {plan}{goes_on}")
        if is_refused:
            sys.exit(1)
        return None
    convert_(module, plan)
    if any(type(one).__module__.startswith("monai.") for one in tree_leaves(arguments)):
        strip_(original_of(module))
    _install(plan, module)
    if _is_first():
        listed = [str(one) for one in plan.segments]
        more = [f"{len(listed) - _LISTED} more"] * (len(listed) > _LISTED)
        _tell("; ".join([told, *listed[:_LISTED], *more]))
    return plan


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _agreed(
    name: str, budget: str, module: nn.Module, arguments: _Arguments
) -> tuple[Plan | UcudnnError, str]:
    """The plan of the first rank, or the error, and what to say about it."""
    with Rendezvous("first step", timeout_s=_WAIT_S) as rendezvous:
        if _is_first():
            rendezvous.send("plan", _planned(name, budget, module, arguments))
        found: tuple[Plan | UcudnnError, str] = rendezvous.receive("plan", 0)
    return found


def _planned(
    name: str, budget: str, module: nn.Module, arguments: _Arguments
) -> tuple[Plan | UcudnnError, str]:
    """The plan that is kept, or a new one, which is kept from now on."""
    from ucudnn.reports.cards import cards
    from ucudnn.steps.tune import tune

    try:
        config = Config(memory_budget=budget)
        path = _place_of(module, arguments, config)
        with suppress(PlanFileError):
            return Plan.load(path), f"{name} follows the plan that is kept in {path}"
        _tell(f"{name} is planned within {budget} of memory, on a copy; it goes on after that")
        with lines(f"planning {name}", _tell):
            plan = tune(module, _inputs(module, arguments), config)
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
    except UcudnnError as error:
        return error, ""
    # Other ranks wait, and the script can go on by torch.
    except Exception as error:  # noqa: BLE001
        return UcudnnError(f"{type(error).__name__}: {first_line(error)}"), ""
    for card in cards(plan)[:2]:
        _tell(f"{card.name.lower()} {card.value}, {card.note}")
    return plan, f"planned in {plan.origin.seconds if plan.origin else 0} s, kept in {path}"


def _inputs(module: nn.Module, arguments: _Arguments) -> Any:
    """The arguments of a forward as example inputs."""
    # Tensors of a class that adds attributes, such as MONAI's, are planned as plain ones.
    args, kwargs = tree_map_only(Tensor, lambda one: one.as_subclass(Tensor), arguments)
    if not kwargs:
        return args
    if not args:
        return kwargs
    signature = inspect.signature(original_of(module).forward)
    return dict(signature.bind(*args, **kwargs).arguments)


def _place_of(module: nn.Module, arguments: _Arguments, config: Config) -> Path:
    """The file in which the plan of a module for such inputs is kept: beside measurements."""
    model = original_of(module)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    # The classes of torch are as old as torch, whose version counts.
    kinds = {type(one) for one in model.modules()}
    own = [kind for kind in kinds if not kind.__module__.startswith("torch.")]
    facts = [
        *(str(model), config.to_dict(), identify(config.backend), held_by(model, ())),
        *(
            torch.get_num_threads(),
            is_compiled(module),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled(),
        ),
        *((name, one.shape, one.dtype, one.stride(), one.requires_grad) for name, one in tensors),
        *((name, *_attributes(one)) for name, one in model.named_modules()),
        *sorted(map(_source, own)),
        *_own_files(),
        *(_described(one) for one in tree_leaves(arguments)),
    ]
    digest = sha256(repr(facts).encode()).hexdigest()[:16]
    return caches.default_path() / "plans" / f"{type(model).__name__}-{digest}.plan.json"


def _source(kind: type[nn.Module]) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # such as a class that was typed in
        return kind.__qualname__


def _attributes(module: nn.Module) -> Iterator[Any]:
    """Attributes on which the course of a forward may depend."""
    for name, value in sorted(vars(module).items()):
        if isinstance(value, (bool, int, float, str, tuple, type(None))) or name == "config":
            yield name, str(value)


def _own_files() -> Iterator[str]:
    """The contents of the script, and of the modules that were imported from its folder."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    folder = Path(script).resolve().parent if script else Path.cwd()
    for name, module in sorted(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/").resolve()
        if file.is_relative_to(folder) and "site-packages" not in file.parts:
            with suppress(OSError):
                yield f"{name} {sha256(file.read_bytes()).hexdigest()}"


def _described(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.shape, argument.dtype, argument.device.type, argument.requires_grad
    return argument if isinstance(argument, (bool, int, float, str)) else type(argument).__name__
