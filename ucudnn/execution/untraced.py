"""Functions that torch.compile does not compile.

After a graph break Dynamo inspects every Python frame that the thread enters while the compiled
function runs, including frames that torch's dispatcher or autograd calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

# part of torch's own library: torch._dynamo, which takes seconds to import, is not needed
from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Callable[..., object])
_SKIP = eval_frame._FrameAction.SKIP
_SKIP_ALL = eval_frame._FrameExecStrategy(_SKIP, _SKIP)
_SKIP_THIS = eval_frame._FrameExecStrategy(_SKIP, eval_frame._FrameAction.DEFAULT)


def untraced(function: _Function) -> _Function:
    """Decorate a function that Dynamo must not compile, including everything that it calls.

    `torch.compiler.disable` does the same by a wrapper, which costs a microsecond per call and
    imports torch._dynamo. This decorator marks the code object, so calls cost nothing more.

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
    """Decorate a function that Dynamo must not compile, though it may compile what it calls.

    >>> @untraced_alone
    ... def twice(layer, x):
    ...     return layer(layer(x))
    >>> twice(abs, -1)
    1
    """
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP_THIS)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # breaks the caller's graph
    return function
