"""No fake tensor of a trace is left: in globals, classes or caches."""

from __future__ import annotations

import collections
import functools
import gc
from types import FunctionType
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import ucudnn
from ucudnn.errors import ConfigError

LOG, LATEST = [], {"y": None}
LAST = None
COUNTER = collections.Counter()


@pytest.fixture(scope="module", autouse=True)
def _small_heap():
    """Strays are looked for in what was imported, too."""
    gc.unfreeze()


class Keeper(nn.Module):
    """Keeps its outputs in its class and in globals, and in itself."""

    shared: ClassVar = None
    table: ClassVar = {}

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Conv2d(3, 3, 3, padding=1), 0
        self.pair, self.hidden = ([],), [torch.ones(3, 3, 1, 1, requires_grad=True)]

    def forward(self, x):
        y = self.layer(x) + nn.functional.conv2d(x, self.hidden[0])
        self.calls += 1
        self.pair[0].append(y)
        type(self).shared = y
        self.table["y"] = [y]
        self._remember(y)
        return y

    @staticmethod
    def _remember(y):
        global LAST  # noqa: PLW0603 - scripts do
        LAST = y
        LOG.append(y)
        LATEST["y"] = (y,)
        COUNTER["calls"] += 1


EARLIER: list[FakeTensor] = []


def all_fakes() -> list[FakeTensor]:
    """All fake tensors of this process."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is FakeTensor]


@pytest.fixture(autouse=True)
def _earlier_fakes(monkeypatch) -> None:
    """What other tests left, as torch.compile's cache does."""
    monkeypatch.setitem(globals(), "EARLIER", all_fakes())


def fakes() -> list[FakeTensor]:
    """The fake tensors that this test made and that are still there."""
    earlier = set(map(id, EARLIER))
    return [one for one in all_fakes() if id(one) not in earlier]


@pytest.mark.slow
def test_what_forward_keeps_in_classes_and_globals_is_put_back():
    x = torch.randn(2, 3, 5, 5)
    ucudnn.trace(Keeper(), [x, x])
    assert (LAST, LOG, LATEST, Keeper.shared, Keeper.table) == (None, [], {"y": None}, None, {})
    assert not fakes()


@pytest.fixture(autouse=True)
def _nothing_global():
    yield
    globals()["LAST"], LATEST["y"], Keeper.shared = None, None, None
    LOG.clear()
    COUNTER.clear()
    Keeper.table.clear()


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError, Exception, KeyboardInterrupt])
@pytest.mark.parametrize("real", [False, True])
def test_a_trace_that_fails_leaves_all_as_it_was(error, real):
    class Failing(Keeper):
        def forward(self, x):
            super().forward(super().forward(x))
            raise error("as you wish")

    model = Failing()
    before = [list(map(id, vars(one).values())) for one in model.modules()]
    with pytest.raises(ConfigError if error is ValueError else error, match="as you wish"):
        ucudnn.trace(model, torch.randn(2, 3, 5, 5), real=real)
    assert [list(map(id, vars(one).values())) for one in model.modules()] == before
    assert (model.pair, model.calls) == (([],), 0)
    assert model.hidden[0].grad is None
    assert not fakes()


@functools.lru_cache(maxsize=4)
def grid(size: int) -> tuple[torch.Tensor]:
    return (torch.ones(size, size),)


class Cached(nn.Module):
    """Its grid is made once, by a function that it does not call itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.layer(x) * size_of(x)


def size_of(x: torch.Tensor) -> torch.Tensor:
    return grid(x.shape[-1])[0]


@pytest.mark.slow
def test_a_cached_function_computes_again():
    grid.cache_clear()
    model, x = Cached(), torch.randn(2, 3, 5, 5)
    ucudnn.trace(model, x)
    assert not fakes()
    assert type(model(x)) is torch.Tensor


@pytest.mark.slow
def test_a_place_that_nobody_expects_is_emptied_and_named():
    elsewhere = {"log": [7], "torch": torch}
    exec("def keep(y):\n    log.append((y, 1))\n    return y", elsewhere)
    keep: FunctionType = elsewhere["keep"]

    class Far(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return through(self.layer(x))

    def through(y):
        return indirect["keep"](y)

    indirect = Opaque(keep)
    model = Far()
    with pytest.raises(ConfigError, match=r"forward keeps tensors .* \(a list of 2\).*real=True"):
        ucudnn.trace(model, torch.randn(2, 3, 5, 5))
    assert elsewhere["log"] == [7]
    assert len(ucudnn.trace(model, torch.randn(2, 3, 5, 5), real=True)) == 2
    # A step is foreseen all the same: real ones are run on a copy.
    x = torch.randn(2, 3, 50, 50)
    kept, known = ucudnn.foresee(model, x), ucudnn.foresee(model.layer, x)
    assert kept.peak_bytes == pytest.approx(known.peak_bytes, rel=0.001)
    assert not fakes()


class Opaque:
    """Says how it is copied, as things do that many share."""

    def __init__(self, function):
        self._function = function

    def __reduce__(self):
        return Opaque, (self._function,)

    def __getitem__(self, name):
        return self._function


ENCODER = nn.Conv2d(3, 3, 1)


class UsesGlobal(nn.Module):
    """Computes by a model that it does not lead to."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return ENCODER(self.layer(x))


@pytest.mark.slow
def test_a_model_that_is_global_gets_no_gradients():
    model, x = UsesGlobal(), torch.randn(2, 3, 5, 5)
    assert len(ucudnn.trace(model, x)) == 5
    assert [one.grad for one in ENCODER.parameters()] == [None, None]
    gradients = [torch.ones_like(one) for one in ENCODER.parameters()]
    for one, gradient in zip(ENCODER.parameters(), gradients, strict=True):
        one.grad = gradient
    ucudnn.trace(model, x)
    for one, gradient in zip(ENCODER.parameters(), gradients, strict=True):
        assert one.grad is gradient
        assert torch.equal(gradient, torch.ones_like(one))
        one.grad = None
    assert not fakes()
