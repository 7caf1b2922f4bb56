"""Stretches of a sequence as segments, and segments inside others: torch's numbers, fewer bytes."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential
from typer.testing import CliRunner

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.cli import app
from ucudnn.errors import PlanError, UcudnnWarning
from ucudnn.execution.micro_batching import named_parts, segment_, unsegment_
from ucudnn.plan import Plan
from ucudnn.segment import Segment, Stretch, stretch_of
from ucudnn.steps.independence import examined
from ucudnn.steps.module_profile import ModuleWatcher


@pytest.fixture(autouse=True)
def _settings(one_thread: None) -> None:
    torch.manual_seed(0)


def recomputed(*names: str) -> list[Segment]:
    return [Segment(name, None) for name in names]


class Net(nn.Module):
    """A sequence between two layers; its modules go by names that are no numbers, too."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.layers = nn.Sequential(*layers[:2])
        for place, one in enumerate(layers[2:]):
            self.layers.add_module(f"layer_{place}", one)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.layers(self.stem(x)))


def net() -> Net:
    return Net(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Sigmoid(), nn.Linear(6, 6)).double()


def samples(count: int = 5) -> Tensor:
    return torch.randn(count, 6, dtype=torch.float64, requires_grad=True)


def left(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Results, gradients and buffers after a step, and the random numbers that come next."""
    torch.manual_seed(1)
    found = []
    model.zero_grad()
    for x in inputs:
        x.grad = None
        found.append(model(x))
    sum(one.square().sum() for one in found).backward()
    found += [one.grad for one in (*inputs, *model.parameters())]
    return [*found, *(one.clone() for one in model.buffers()), torch.rand(2)]


def assert_as_torch(
    model: nn.Module, segments: list[Segment], *inputs: Tensor, bound: float = 1e-12
) -> nn.Module:
    """Two steps without segments and two with them leave the same."""
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    segment_(ours, segments)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UcudnnWarning)
        for _ in range(2):
            for a, b in zip(left(ours, *inputs), left(theirs, *inputs), strict=True):
                assert (a - b).double().norm() <= bound * b.double().norm()
    return ours


WAYS = {
    **{f"{n} recomputed": Segment("", n) for n in (1, 2, 3)},
    "last kept": Segment("", 2, kept=1),
    "kept": Segment("", 2, recompute=False),
    "whole": Segment("", None),
    "selective": Segment("", None, recompute=False, selective=True),
    "offloaded": Segment("", 2, recompute=False, offload=True),
}
EACH_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
STRETCHES = [
    ["layers[0:2]"],
    ["layers[1:4]"],
    ["layers[0:5]"],
    ["layers[0:2]", "layers[2:3]", "layers[3:5]"],
    ["layers[1:3]", "layers[0:4]", "layers[1:4]", "layers.layer_0"],
    ["layers", "layers[1:5]", "layers[2:4]", "layers[4:5]", ""],
]


@EACH_WAY
@pytest.mark.parametrize("names", STRETCHES)
def test_results_and_gradients_are_torchs(way: Segment, names: list[str]) -> None:
    model, segments = net(), [replace(way, module=name) for name in names]
    for count in (7, 1, 0):
        ours = assert_as_torch(model, segments, samples(count))
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                torch.testing.assert_close(ours(samples(count)[:0]), model(samples(0)))


def test_of_the_model_itself() -> None:
    model = nn.Sequential(*net().layers)
    assert_as_torch(model, [Segment("[0:3]", 2), *recomputed("[1:3]", "3")], samples())


def layer(draw: random.Random) -> nn.Module:
    """A layer that random numbers, statistics or changes in place make hard to repeat."""
    width = nn.Linear(6, 6)
    kinds = [
        width,
        nn.Sequential(width, nn.ReLU(inplace=True)),
        nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(inplace=True), width),
        nn.Sequential(width, nn.BatchNorm1d(6, momentum=None)),
        nn.Sequential(nn.Dropout(0.4), width, nn.Dropout(0.2, inplace=True)),
        nn.Tanh(),
        nn.Sequential(width, nn.RReLU()),
        nn.Sequential(width, nn.LayerNorm(6), nn.GELU()),
    ]
    return draw.choice(kinds)


def nested(draw: random.Random, name: str, begin: int, end: int) -> Iterator[Segment]:
    """Random segments among the children of a sequence, each inside the one before, or beside."""
    if end - begin < 1 or draw.random() < 0.2:
        return
    first = draw.randint(begin, end - 1)
    last = draw.randint(first + 1, end)
    if (last - first, draw.random() < 0.5) != (end - begin, True):
        kind = draw.choice([{}, {}, {"selective": True}, {"recompute": False, "selective": True}])
        yield Segment(str(Stretch(name, first, last)), None, **kind)
        if last - first > 1:
            cut = draw.randint(first, last)
            for part in ((first, cut), (cut, last)):
                if part != (first, last):
                    yield from nested(draw, name, *part)
    yield from nested(draw, name, last, end)


@pytest.mark.parametrize("seed", range(60))
def test_recomputed_ones_inside_recomputed_ones_at_any_depth(seed: int) -> None:
    draw = random.Random(seed)
    layers = [layer(draw) for _ in range(8)]
    inner = nn.Sequential(*layers[4:])
    model = Net(*layers[:4], inner, nn.Linear(6, 6)).double()
    segments = [*nested(draw, "layers", 0, 6), *nested(draw, "layers.layer_2", 0, 4)]
    segments += recomputed("layers.layer_2", "layers", "")[: draw.randint(0, 3)]
    segments = [*{one.module: one for one in segments}.values()]
    draw.shuffle(segments)
    assert_as_torch(model, segments, samples())
    assert_as_torch(model.eval(), segments, samples())
