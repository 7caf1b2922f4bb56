"""Helpers for torch.compile: to unwrap models, to compile copies apart, and to exempt functions.

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
from itertools import count
from typing import Any, TypeVar

import torch
from torch import nn

# `torch._C._dynamo` is part of torch's compiled library; to import `torch._dynamo` takes seconds.
from torch._C._dynamo import eval_frame

# While steps are run to judge a plan, Dynamo's limits of recompilations are this much higher.
_MORE_RECOMPILATIONS = 16

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
    # `_compiled_call_impl` is the call of a module that `module.compile()` compiled in place.
    modules = model.modules()
    return any(is_wrapped(one) or one._compiled_call_impl is not None for one in modules)


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
    # torch has no public way to read the settings of a compiled function, so they are taken from
    # the closure of its wrapper.
    context = inspect.getclosurevars(compiled).nonlocals["self"]
    return _apart(context)(function)  # type: ignore[no-any-return]


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
        return module(*args, **kwargs)

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
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP_THIS)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # breaks the caller's graph
    return function
