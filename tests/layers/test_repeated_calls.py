"""A module that is called several times in a step is a segment in each call, as torch computes."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ucudnn.backends import open_backend
from ucudnn.errors import UcudnnWarning
from ucudnn.execution.micro_batching import segment_
from ucudnn.segment import Segment
from ucudnn.steps.independence import Independence, examined


@pytest.fixture(autouse=True)
def _settings(one_thread: None) -> None:
    torch.manual_seed(0)


class Body(nn.Module):
    """Draws random numbers, updates statistics and writes in place, unless samples are apart."""

    def __init__(self, is_apart: bool = False) -> None:
        super().__init__()
        norm = nn.LayerNorm(8) if is_apart else nn.BatchNorm1d(8)
        dropout = nn.Dropout(0 if is_apart else 0.3)
        self.layers = nn.Sequential(
            *(nn.Linear(6, 8), norm, nn.ReLU(inplace=True), dropout, nn.Linear(8, 6), nn.GELU())
        )

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        return self.layers(x if other is None else torch.tanh(x + other))


class Pair(nn.Module):
    """Two views of a sample through the same body."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x) * self.body(x.flip(0) * 0.5))


class Sizes(Pair):
    """Three batch sizes in one step."""

    def forward(self, x: Tensor) -> Any:
        two, few, many = self.body(x[:2]), self.body(x[:3]), self.body(torch.cat([x, x * 0.2]))
        return self.head(many[: len(x)]) + self.head(few).sum(0) + self.head(two)[:1]


class Modes(Pair):
    """One call in training mode, and one in evaluation mode."""

    def forward(self, x: Tensor) -> Any:
        first, mode = self.body(x), self.body.training
        self.body.eval()
        second = self.body(x * 0.3)
        self.body.train(mode)
        return self.head(first + second)


class Loop(Pair):
    """A state that goes through the body again and again, with a loss for each."""

    def forward(self, x: Tensor) -> Any:
        state, found = x, []
        for _ in range(4):
            state = self.body(x, state)
            found.append(self.head(state))
        return torch.stack(found, 1)


class Cut(Pair):
    """The same, but no gradient goes from one iteration to the one before."""

    def forward(self, x: Tensor) -> Any:
        state, found = x, []
        for _ in range(3):
            state = self.body(x, state.detach())
            found.append(self.head(state))
        return torch.stack(found, 1)


class Inside(Pair):
    """The body of the body."""

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(self.body(x)))


class Critic(Pair):
    """Real, fake, and a penalty for the gradient between them."""

    def forward(self, x: Tensor) -> Any:
        real, fake = self.head(self.body(x)), self.head(self.body(x.detach() * 0.3))
        between = (x.detach() * 0.6).requires_grad_()
        with torch.enable_grad():
            value = self.head(self.body(between)).sum()
            (slope,) = torch.autograd.grad(value, between, create_graph=True)
        return real - fake + slope.square().sum(1, keepdim=True)


class Teacher(Pair):
    """A call without gradients before one with them."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            target = self.body(x * 0.9)
        return self.head(self.body(x) - target)


SELECTIVE = Segment("body", None, recompute=False, selective=True)
FIRST, LAST = Segment("body.layers[0:3]", None), Segment("body.layers[3:6]", None)
# Whatever the body computes.
REPEATED = {
    "recomputed": [Segment("body", None)],
    "selective": [SELECTIVE],
    "both": [Segment("body", None, selective=True)],
    "offloaded": [Segment("body", None, recompute=False, offload=True)],
    "stretches": [FIRST, LAST],
    "nested": [Segment("body", None), FIRST, Segment("body.layers[1:2]", None), LAST],
    "selective inside": [Segment("body", None), replace(SELECTIVE, module="body.layers")],
    "in the model": [Segment("", None), Segment("body", None), FIRST, LAST],
}
# If its samples do not depend on each other.
DIVIDED = {
    "in micro-batches": [Segment("body", 2)],
    "last kept": [Segment("body", 2, kept=1)],
    "kept": [Segment("body", 2, recompute=False)],
    "selective": [Segment("body", 2, selective=True)],
    "stretches inside": [Segment("body", 2), FIRST, LAST],
    "inside a stretch": [
        *(Segment("body", None), FIRST, Segment("body.layers[0:2]", 2)),
        Segment("body.layers[3:6]", 1),
    ],
}


def left(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    x.grad = None
    result = model(x)
    result.square().sum().backward()
    found = [result, x.grad, *(one.grad for one in model.parameters())]
    return [*found, *(one.clone() for one in model.buffers()), torch.rand(2)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Pair, Sizes, Modes, Loop, Cut, Inside, Critic, Teacher])
@pytest.mark.parametrize("way", [*REPEATED, *(f"divided, {one}" for one in DIVIDED)])
def test_steps_leave_what_torch_leaves(kind: type[Pair], way: str) -> None:
    is_divided = way.startswith("divided")
    segments = DIVIDED[way.removeprefix("divided, ")] if is_divided else REPEATED[way]
    ours = kind(Body(is_apart=is_divided)).double()
    theirs = copy.deepcopy(ours)
    segment_(ours, segments)
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UcudnnWarning)
        for mode in (True, True, False):
            for a, b in zip(left(ours.train(mode), x), left(theirs.train(mode), x), strict=True):
                assert (a - b).double().norm() <= 1e-12 * b.double().norm()


def kept_bytes(model: nn.Module, x: Tensor, calls: int) -> int:
    """Bytes that calls of a model, one on the result of the other, keep for their backward."""
    results = [x]

    def run() -> None:
        hidden = x
        for _ in range(calls):
            hidden = model(hidden)
        results.append(hidden)

    span = open_backend("torch_cpu").span(run)
    results[-1].sum().backward()
    return span.end_bytes


def test_each_call_keeps_bytes_of_its_own() -> None:
    # In units of one result, by n calls of a chain of four tanhs.
    unit, chain = 1 << 20, nn.Sequential(*[nn.Tanh() for _ in range(4)])
    x = torch.randn(8, unit // 32, requires_grad=True)
    for segment, kept in [(None, 4), (Segment("", None), 1), (Segment("", 2, kept=1), 2)]:
        for calls in (1, 2, 5):
            segment_(chain, [segment] if segment else [])
            kept_bytes(chain, x, calls)  # looks up what is kept for later calls
            found = kept_bytes(chain, x, calls)
            assert found / unit == pytest.approx(calls * kept, abs=0.2)


class Varying(Pair):
    """Calls whose second argument has samples, or none, or is shared."""

    def __init__(self, *others: str) -> None:
        super().__init__(Body(is_apart=True))
        self.others = others

    def forward(self, x: Tensor) -> Any:
        shared = torch.ones(1, 6, dtype=x.dtype)
        values = {"none": None, "shared": shared, "samples": x * 2}
        return sum(self.head(self.body(x, values[one])) for one in self.others)


def found_in(model: nn.Module) -> Independence:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    return examined(model, lambda: model(x).square().sum().backward(), {"body": 2})["body"]


def test_what_is_found_out_holds_for_all_calls() -> None:
    for others, shared in [
        (("none", "shared"), (1,)),
        (("shared", "none"), (1,)),
        (("samples", "none", "samples"), ()),
    ]:
        found = found_in(Varying(*others).double())
        assert (found.reason, found.shared) == ("", shared)
    for others in (("samples", "shared"), ("shared", "none", "samples")):
        found = found_in(Varying(*others).double())
        assert found.reason == "its calls do not divide the same arguments"
        assert found.repeats
    # Each mode of a call is one in which it runs as a segment.
    model = Modes(Body(is_apart=True)).double()
    found = found_in(model)
    assert len(found.divides_in) == len(found.repeats_in) == 2
    ours = copy.deepcopy(model)
    segment_(ours, [found.described(Segment("body", 2))])
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UcudnnWarning)
        for a, b in zip(left(ours, x), left(model, x), strict=True):
            torch.testing.assert_close(a, b)
