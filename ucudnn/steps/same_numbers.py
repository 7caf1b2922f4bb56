"""Random numbers that are the same for each sample and in each layout, to compare steps."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from math import prod
from types import CodeType
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

# Operators whose result has a random row for each row of their arguments.
_BY_ROWS = {
    *("bernoulli", "binomial", "multinomial", "native_dropout", "normal", "poisson"),
    *("rrelu_with_noise", "rrelu_with_noise_", "_sample_dirichlet", "_standard_gamma"),
}
# An operator is called for so many rows one by one.
_MOST_ROWS = 4096
# What runs between an operator and the mode: other modes, and modules of torch.
_MODES = ("__torch_dispatch__", "__torch_function__")
_BETWEEN = ("_python_dispatch.py", "_compile.py", "eval_frame.py", "_stats.py")
# States in which the first of torch's numbers are small, and in which they are large.
EXTREMES = (1, 2)
# Seeds are sought by which the first draws are all below this, or all above 1 minus this.
_EXTREME, _DRAWS = 0.1, 3


class SameForSamples(TorchDispatchMode):
    """Gives all rows of a tensor the same random numbers, those of the place where they are drawn.

    So a part of a batch has the numbers of the whole batch, in whatever order parts are computed.
    torch draws in the order of memory; here, each element has the same number in any layout of the
    tensor. Operators that draw with a generator of their own draw for all rows.

    >>> x = torch.ones(4, 3, 5, 5)
    >>> with SameForSamples():
    ...     whole, part, last = (
    ...         torch.nn.functional.dropout(one)
    ...         for one in (x, x[:2], x.to(memory_format=torch.channels_last))
    ...     )
    >>> torch.equal(whole[:2], part), torch.equal(whole[:1], whole[1:2]), torch.equal(whole, last)
    (True, True, True)

    Args:
        state: number of the random numbers.
        varied: places at which `state` decides; None: at all.

    Attributes:
        drawn: the shapes that were drawn, by place.
    """

    def __init__(self, state: int = 0, varied: Collection[int] | None = None) -> None:
        super().__init__()
        self.drawn: dict[int, list[torch.Size]] = {}
        self._state, self._varied = state, varied

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; if it draws random numbers, it gets contiguous copies of its tensors."""
        del types
        kwargs = kwargs or {}
        # torch tags every operator that reads a generator, so no list of operators is needed here.
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        plain = tree_map_only(Tensor, Tensor.contiguous, args)
        is_own = kwargs.get("generator") is not None
        result = func(*plain, **kwargs) if is_own else self._drawn(func, plain, kwargs, _place())
        for given, used in zip(args, plain, strict=True):
            if isinstance(given, Tensor) and given is not used and func._schema.is_mutable:
                given.copy_(used)
        # An in-place operator returns its argument: the tensor that was passed, not the copy.
        if result is plain[0]:
            return args[0]
        like = next((one for one in args if isinstance(one, Tensor)), None)
        return result if like is None else tree_map_only(Tensor, partial(_laid_out, like), result)

    def _drawn(self, func: Any, args: Any, kwargs: Any, place: int) -> Any:
        """What an operator draws at a place, for one row."""
        state = self._state if self._varied is None or place in self._varied else 0
        # Code often decides by one number for a sample, so states 1 and 2 are the extremes of that.
        one_seed = _seeds_of_torch()[state - 1] if state in EXTREMES else place + state
        result = self._by_rows(func, args, kwargs, place + state, one_seed)
        first = result[0] if isinstance(result, (tuple, list)) else result
        self.drawn.setdefault(place, []).append(first.shape)
        return result

    def _by_rows(self, func: Any, args: Any, kwargs: Any, seed: int, one_seed: int) -> Any:
        names = [one.name for one in func._schema.arguments]
        whole = next((one for one in args if isinstance(one, Tensor)), None)
        if whole is None and "size" in names and args[names.index("size")]:
            return _of_size(func, args, kwargs, names.index("size"), seed, one_seed)
        if whole is not None and prod(whole.shape[1:]) == 1:
            seed = one_seed
        if whole is None or not whole.dim() or whole.numel() == 1:
            torch.manual_seed(one_seed)
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        tensors = sum(isinstance(one, Tensor) for one in args)
        # These operators use no value of their only tensor, so a new row may stand for it.
        if tensors == 1 and name not in _BY_ROWS and name.endswith("_"):
            torch.manual_seed(seed)
            row = torch.empty(whole[:1].shape, dtype=whole.dtype, device=whole.device)
            drawn = func(*[row if one is whole else one for one in args], **kwargs)
            return whole.copy_(drawn.expand_as(whole))
        rows = range(len(whole)) if len(whole) <= _MOST_ROWS else ()
        if not rows or not (name in _BY_ROWS or (tensors == 1 and name.endswith("_like"))):
            torch.manual_seed(seed)
            return func(*args, **kwargs)
        found = []
        for n in rows:
            torch.manual_seed(seed)
            found.append(func(*tree_map_only(Tensor, partial(_row, n, len(rows)), args), **kwargs))
        # If the operator writes in place, the rows are views of the tensor that it writes to.
        return whole if name.endswith("_") else _rows_joined(found)


class SingleNumbers(TorchDispatchMode):
    """Makes random numbers that are drawn one by one small or large, and leaves all others alone.

    By such a number a step may decide to leave out a layer.

    >>> with SingleNumbers(1):
    ...     small = torch.rand(())
    >>> with SingleNumbers(2):
    ...     large = torch.rand(())
    >>> bool(small < 0.1), bool(large > 0.9)
    (True, True)

    Args:
        state: one of `EXTREMES`.
    """

    def __init__(self, state: int) -> None:
        super().__init__()
        self._seed = _seeds_of_torch()[state - 1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; a random number without axes is drawn by the seed."""
        del types
        result = func(*args, **(kwargs or {}))
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags and isinstance(result, Tensor)
        if not is_drawn or result.dim() or (kwargs or {}).get("generator") is not None:
            return result
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            return func(*args, **(kwargs or {}))


def _of_size(func: Any, args: Any, kwargs: Any, where: int, seed: int, one_seed: int) -> Tensor:
    """A tensor that is drawn by its size: one row, repeated."""
    size = args[where]
    torch.manual_seed(one_seed if prod(size[1:]) == 1 else seed)
    row: Tensor = func(*args[:where], [1, *size[1:]], *args[where + 1 :], **kwargs)
    return row.expand(size).clone()


def _rows_joined(found: Sequence[Any]) -> Any:
    if isinstance(found[0], tuple):
        return tuple(torch.cat(column) for column in zip(*found, strict=True))
    return torch.cat([*found])


def _row(n: int, rows: int, tensor: Tensor) -> Tensor:
    return tensor[n : n + 1] if tensor.dim() and len(tensor) == rows else tensor


def _laid_out(like: Tensor, result: Tensor) -> Tensor:
    """The result in the layout of the tensor from which it was computed."""
    if result.shape != like.shape:
        return result
    return torch.empty_like(like, dtype=result.dtype).copy_(result)


def _place() -> int:
    """A number for the line of code that draws, the same wherever it is called from."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_between(frame.f_code):
        frame = frame.f_back
    return crc32(f"{frame.f_code.co_filename}:{frame.f_lineno}".encode())


def _is_between(code: CodeType) -> bool:
    # Modes that recompute call an operator from one line in forward, and from another in backward.
    return code.co_name in _MODES or code.co_filename.endswith(_BETWEEN)


@lru_cache(1)
def _seeds_of_torch() -> tuple[int, int]:
    """Two seeds by which torch's first number is small, and by which it is large."""
    generator = torch.Generator()

    def first(seed: int) -> list[float]:
        return [torch.rand((), generator=generator.manual_seed(seed)).item()]

    return _extremes(first)


@lru_cache(1)
def _seeds_of_python() -> tuple[int, int]:
    return _extremes(lambda seed: _draws(random.Random(seed)))  # noqa: S311 - no secret


@lru_cache(1)
def _seeds_of_numpy() -> tuple[int, int]:
    return _extremes(lambda seed: [*np.random.RandomState(seed).rand(_DRAWS)])


def _draws(generator: random.Random) -> list[float]:
    return [generator.random() for _ in range(_DRAWS)]


def _extremes(draws: Callable[[int], Sequence[float]]) -> tuple[int, int]:
    """A seed whose first draws are all small, and one whose first draws are all large."""
    low = next(one for one in range(10**6) if max(draws(one)) < _EXTREME)
    high = next(one for one in range(10**6) if min(draws(one)) > 1 - _EXTREME)
    return low, high


def seed_extremes(state: int) -> None:
    """Seed Python's and NumPy's generators so that their first numbers are small, or large.

    Args:
        state: 0: small numbers come first; 1: large ones.
    """
    random.seed(_seeds_of_python()[state])
    np.random.seed(_seeds_of_numpy()[state])
