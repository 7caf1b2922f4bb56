"""Helpers for torch.compile: to compile a model within a budget, copies apart, and functions not.

To judge a plan, tuning runs steps on copies of the model, in up to two layouts. As far as torch
allows, the compiled code of the copies is kept apart from that of the user's model. So neither
changes what the other runs, nor uses up the recompilations that Dynamo allows the other.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

# `torch._C._dynamo` is part of torch's compiled library; to import `torch._dynamo` takes seconds.
from torch._C._dynamo import eval_frame
from torch.compiler import is_exporting
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ucudnn.segment import UNCOMPILED, Compiled

# While steps are run to judge a plan, Dynamo's limits of recompilations are this much higher.
_MORE_RECOMPILATIONS = 16
# So many sizes of inputs, such as those of an epoch and of its last batch, have code of their own;
# all others share code for any size. Otherwise, code for any size would take the place of the code
# that was measured, as soon as a second size is seen.
_SIZES = 2

_numbers = count()
_Function = TypeVar("_Function", bound=Callable[..., object])
_SKIP = eval_frame._FrameAction.SKIP
_SKIP_ALL = eval_frame._FrameExecStrategy(_SKIP, _SKIP)
_SKIP_THIS = eval_frame._FrameExecStrategy(_SKIP, eval_frame._FrameAction.DEFAULT)


def original_of(model: nn.Module) -> nn.Module:
    """The module that `torch.compile(module)` wraps; any other model is returned as it is.

    >>> layer = nn.Linear(2, 1)
    >>> original_of(torch.compile(layer, backend="eager")) is layer, original_of(layer) is layer
    (True, True)
    """
    return model._orig_mod if is_wrapped(model) else model  # type: ignore[return-value]


def is_wrapped(model: nn.Module) -> bool:
    """True if a model is the wrapper that `torch.compile(module)` returns."""
    # torch.compile imports Dynamo: as long as Dynamo is not imported, no module is compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def is_compiled(model: nn.Module) -> bool:
    """True if a model, or any of its modules, is compiled by torch.compile.

    >>> layer = nn.Linear(2, 1)
    >>> is_compiled(layer), is_compiled(nn.Sequential(torch.compile(layer, backend="eager")))
    (False, True)
    """
    return any(map(_is_compiled_itself, model.modules()))


def settings_of(model: nn.Module) -> list[Any]:
    """What each compiled module of a model is compiled with; the same objects while it stays so."""
    return [_context_of(one) for one in model.modules() if _is_compiled_itself(one)]


def is_converted(model: nn.Module) -> bool:
    """True if a plan has a model compiled, or not compiled."""
    return any(isinstance(one._compiled_call_impl, CompiledCall) for one in model.modules())


def _is_compiled_itself(module: nn.Module) -> bool:
    # `_compiled_call_impl` is the call of a module that `module.compile()` compiled in place.
    call = module._compiled_call_impl
    if isinstance(call, CompiledCall):
        return call.compiled != UNCOMPILED
    return _context_of(module) is not None


def replays_graphs(model: nn.Module) -> bool:
    """True if compiled code of a model records CUDA graphs, as with `mode="reduce-overhead"`."""
    for module in model.modules():
        compiled = module if is_wrapped(module) else module._compiled_call_impl
        settings_of = getattr(compiled, "get_compiler_config", None)
        settings = settings_of() if settings_of is not None else None
        if settings and settings.get("triton.cudagraphs"):
            return True
    return False


def uncompiled(is_needed: bool = True) -> AbstractContextManager[object]:
    """Context in which compiled modules are computed as if they were not compiled.

    >>> layer = torch.compile(nn.Linear(2, 1), backend=lambda *_: 1 / 0)
    >>> with uncompiled():
    ...     layer(torch.ones(3, 2)).shape
    torch.Size([3, 1])
    """
    return torch.compiler.set_stance("force_eager") if is_needed else nullcontext()


def room_to_compile(model: nn.Module) -> AbstractContextManager[object]:
    """Context with higher limits of Dynamo's recompilations, if the model is compiled."""
    if not is_compiled(model):
        return nullcontext()
    from torch._dynamo import config

    # Some compiled code of the copies is not kept apart from that of the user's model, and counts
    # towards the same limits of Dynamo. Beyond a limit, Dynamo would run the steps uncompiled,
    # without an error.
    names = ("recompile_limit", "accumulated_recompile_limit")
    limits = {name: getattr(config, name) + _MORE_RECOMPILATIONS for name in names}
    return config.patch(limits)  # type: ignore[no-any-return]


class BudgetedBackend:
    """A backend of torch.compile that lets a graph keep a share of its activations for backward.

    Dynamo does not guard torch's setting of this share, and reads it whenever it compiles. So each
    model has a backend of its own, by which the share holds for whatever is compiled later.

    Attributes:
        nodes: operators of each graph that was compiled.

    Args:
        share: of the activations, from 0 to 1.
        inner: the backend that compiles; None: Inductor.
    """

    def __init__(self, share: float, inner: Callable[..., Any] | None = None) -> None:
        self._share, self._inner = share, inner
        self.nodes: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """Compile a graph."""
        from torch._functorch import config

        inner = self._inner
        if inner is None:  # to import Inductor takes seconds
            from torch._inductor import compile_fx

            inner = compile_fx.compile_fx
        # What is recomputed has a graph of its own inside.
        graphs = (one.graph for one in graph.modules() if isinstance(one, torch.fx.GraphModule))
        kinds = ("call_function", "call_method", "call_module")
        self.nodes.append(sum(node.op in kinds for one in graphs for node in one.nodes))
        with config.patch(activation_memory_budget=self._share):
            return inner(graph, inputs)


class CompiledCall:
    """The call of a module, compiled as a whole, or not at all, whatever its user has compiled.

    As the attribute `_compiled_call_impl` of the module, it takes the place of torch's own call.
    Copies and files of the module do not have it, as they have no other compiled code.

    >>> call = CompiledCall(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), UNCOMPILED)
    >>> call(torch.ones(1, 3, 4, 4)).shape
    torch.Size([1, 8, 2, 2])

    Attributes:
        compiled: the argument of this name.
        hidden: the call whose place it takes, if there is one.
        backend: what compiles; None: nothing does.

    Args:
        module: any module; if it is compiled, its settings stay.
        compiled: the share of activations to keep, or `UNCOMPILED`.
        like: a compiled module with the settings to take; None: the module itself.
    """

    def __init__(
        self, module: nn.Module, compiled: Compiled, like: nn.Module | None = None
    ) -> None:
        self.compiled, self.hidden = compiled, module._compiled_call_impl
        self.backend: BudgetedBackend | None = None
        self._whole = original_of(module)
        # By whether there is a graph, and the sizes of the inputs. So evaluations, which have other
        # code anyway, do not take the place of a training batch.
        self._of_sizes: dict[Any, Callable[..., Any]] = {}
        if compiled == UNCOMPILED:
            return
        like = module if like is None else like
        context = _context_of(like) or _context_of(_below_ranks(like))
        inner = None
        settings = dict[str, Any](dynamic=None)
        if context is not None:
            inner = _backend_of(context.callback)
            is_whole = getattr(context, "fullgraph", False)  # which torch 2.13 has
            settings = {"fullgraph": is_whole, "dynamic": context._dynamic}
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
            settings["isolate_recompiles"] = True
        self.backend = settings["backend"] = BudgetedBackend(float(compiled), inner)
        self._most_sizes = _SIZES if settings["dynamic"] is None else 0
        self._compile = partial(torch.compile, **settings)
        self._of_any = self._compile(_call_of(self._whole))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if self.backend is None or torch._C._is_tracing() or is_exporting():
            return self._whole._call_impl(*args, **kwargs)
        run = self._of_size(args, kwargs)
        if DistributedDataParallel._active_ddp_module is None:
            return run(*args, **kwargs)
        from torch._dynamo import config

        # torch would compile a graph for each bucket of gradients, and not the code that was
        # measured; of what is recomputed it cannot.
        with config.patch(optimize_ddp=False):
            return run(*args, **kwargs)

    def _of_size(self, args: Any, kwargs: Any) -> Callable[..., Any]:
        """The code for the sizes of these inputs."""
        is_graph, found = torch.is_grad_enabled(), self._of_sizes
        leaves = tree_leaves((args, kwargs))
        key = is_graph, *(one.shape for one in leaves if isinstance(one, Tensor))
        if key not in found and sum(of == is_graph for of, *_ in found) < self._most_sizes:
            # Numbers among the inputs may vary.
            dynamic = None if any(type(one) in (int, float) for one in leaves) else False
            found[key] = self._compile(_call_of(self._whole), dynamic=dynamic)
        return found.get(key, self._of_any)


def compile_(model: nn.Module, compiled: Compiled | None) -> None:
    """Compile a model as a whole, in place, or let nothing of it be compiled; None undoes that."""
    for one in model.modules():
        if isinstance(one._compiled_call_impl, CompiledCall):
            one._compiled_call_impl = one._compiled_call_impl.hidden
    if compiled is None:
        return
    whole = None if compiled == UNCOMPILED else _below_ranks(model)
    for one in [*filter(_is_compiled_itself, model.modules())]:
        # What is around a DistributedDataParallel would compile its forward, too.
        if whole is None or (one is not whole and any(inner is whole for inner in one.modules())):
            one._compiled_call_impl = CompiledCall(one, UNCOMPILED)
    if whole is not None:
        whole._compiled_call_impl = CompiledCall(whole, compiled, like=model)


def _below_ranks(model: nn.Module) -> nn.Module:
    """The module that a DistributedDataParallel wraps, or else the model."""
    inner = original_of(model)
    return _below_ranks(inner.module) if isinstance(inner, DistributedDataParallel) else model


def _context_of(module: nn.Module) -> Any:
    """The settings with which a module is compiled; None if it is not."""
    if is_wrapped(module):
        return module.dynamo_ctx
    call = module._compiled_call_impl
    if isinstance(call, CompiledCall) or call is None:
        return None
    return _context_in(call)


def _context_in(compiled: Callable[..., Any]) -> Any:
    # torch has no public way to read the settings of a compiled function, so they are taken from
    # the closure of its wrapper. Where Dynamo is disabled, torch wraps nothing.
    return inspect.getclosurevars(compiled).nonlocals.get("self")


def _backend_of(callback: Any) -> Callable[..., Any]:
    """The backend inside the callback of a compiling context."""
    # The second name is that of torch before 2.13.
    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):
        while hasattr(callback, name):
            callback = getattr(callback, name)
    found: Callable[..., Any] = callback
    return found


def compiled_as(model: nn.Module, copied: nn.Module) -> Callable[..., Any]:
    """Compile a copy of a model with the model's settings; the two share no compiled code.

    If the model is not wrapped by torch.compile, the copy itself is returned. A module of the copy
    is then compiled if its original is.

    >>> layer, x = nn.Linear(2, 1), torch.ones(3, 2)
    >>> again = copy.deepcopy(layer)
    >>> torch.equal(compiled_as(torch.compile(layer, backend="eager"), again)(x), layer(x))
    True
    """
    if not is_wrapped(model):
        return copied
    return _apart(model.dynamo_ctx)(_call_of(copied))  # type: ignore[no-any-return]


def contexts_apart(model: nn.Module) -> dict[int, Any]:
    """Map ids of wrapped modules' compiling contexts to copies that share no compiled code."""
    wrapped = (one.dynamo_ctx for one in model.modules() if is_wrapped(one))
    return {id(context): _apart(context) for context in wrapped}


def recompiled(compiled: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` with the settings of `compiled`; the two share no compiled code.

    >>> def double(x):
    ...     return 2 * x
    >>> recompiled(torch.compile(double, backend="eager"), lambda x: x + 1)(torch.ones(()))
    tensor(2.)
    """
    context = _context_in(compiled)
    return function if context is None else _apart(context)(function)


def _apart(context: Any) -> Any:
    """Copy a compiling context so that it shares no compiled code with the original."""
    context = copy.copy(context)
    # After a graph break, Dynamo compiles the rest of the user's function, and keeps and counts
    # this code together with that function, which the copies of the model share. From torch 2.13
    # on, Dynamo does so separately for each value of `_isolate_recompiles_id`.
    if hasattr(context, "_isolate_recompiles_id"):
        numbers = sys.modules["torch._dynamo.eval_frame"]._next_isolate_recompiles_id
        context._isolate_recompiles_id = next(numbers)
    return context


def _call_of(module: nn.Module) -> Callable[..., Any]:
    """A function that calls a module, and whose code object no other function has."""

    def call(*args: Any, **kwargs: Any) -> Any:
        # Where Dynamo gives up, the module must not call its compiled call again.
        return module._call_impl(*args, **kwargs)

    # Dynamo keeps and counts compiled code for each code object. For each name of a code object, it
    # also remembers which input sizes have varied. If all models had the same name here, Dynamo
    # would compile a model for inputs of any size because another model had inputs of another size.
    call.__code__ = call.__code__.replace(co_name=f"step_{next(_numbers)}")
    return call


# After a graph break Dynamo inspects every Python frame that the thread enters while the compiled
# function runs, including frames that torch's dispatcher or autograd calls. The decorators below
# keep Dynamo from compiling frames of this package.
def untraced(function: _Function) -> _Function:
    """Decorate a function that Dynamo must not compile; nor may it compile what the function calls.

    `torch.compiler.disable` does the same by a wrapper, which costs a microsecond per call and
    imports torch._dynamo. This decorator only marks the code object, so that calls take no
    additional time.

    >>> @untraced
    ... def kernel(x):
    ...     return x + 1
    >>> kernel(1)
    2
    """
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP_ALL)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # breaks the caller's graph
    return function


def untraced_alone(function: _Function) -> _Function:
    """Decorate a function that Dynamo must not compile; it may compile what the function calls.

    >>> @untraced_alone
    ... def twice(layer, x):
    ...     return layer(layer(x))
    >>> twice(abs, -1)
    1
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # breaks the caller's graph
    return inlined(function)


def inlined(function: _Function) -> _Function:
    """Decorate a function that is part of its caller's graph, or else of none.

    >>> @inlined
    ... def thrice(x):
    ...     return 3 * x
    >>> thrice(2)
    6
    """
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP_THIS)
    return function
