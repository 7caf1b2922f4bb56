"""Only modules whose samples do not see each other may run in micro-batches."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from itertools import count
from math import inf

import numpy as np
import pytest
import torch
from packaged import SPEECH, monai, transformers
from torch import nn

from ucudnn.execution.micro_batching import segment_
from ucudnn.kernels.deadline import Deadline
from ucudnn.segment import Segment
from ucudnn.steps.independence import NO_TIME, examined


@pytest.fixture(autouse=True)
def _settings(one_thread):
    torch.manual_seed(0)


class Function(nn.Module):
    """A module that computes a function of itself and its arguments."""

    def __init__(self, function, **attributes) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args, **named):
        return self.function(self, *args, **named)


def finding(model, *inputs, size=2, **named):
    return examined(model, lambda: model(*inputs, **named), {"": size})[""]


@dataclass
class Holder:
    value: torch.Tensor


def bank():
    return nn.Buffer(torch.full((3, 6), 0.5))


def remembers(self, x):
    with torch.no_grad():
        self.bank[:] = x[:3]
    return x @ self.bank.T


def averages(self, x):
    self.bank = 0.9 * self.bank + 0.1 * x.detach().mean(0)
    return x * 2


def counts(self, x):
    self.calls += 1
    return x * 2


def grows(self, x):
    self.rows.append(x.detach())
    return x * 2


def leaves(self, x):
    self.loss = x.square().mean()
    return x * 2


def by_mean(self, x):
    return x * 2 if x.mean() < 0 else x * 3


SAMPLES = 0.1 + torch.rand(6, 6, generator=torch.Generator().manual_seed(1))
DEPEND, OTHER = "samples depend on each other", "part of a batch gives other results"
# A module, its arguments, words of the reason, and whether it may be recomputed as a whole.
MIXING = {
    "BatchNorm": (nn.BatchNorm1d(6), "updates its buffers", True),
    "BatchNorm without statistics": (nn.BatchNorm1d(6, track_running_stats=False), DEPEND, True),
    "mean of the batch": (Function(lambda _, x: x - x.mean(0)), DEPEND, True),
    "mean without NaN": (Function(lambda _, x: x - x.nanmean(0)), DEPEND, True),
    "mean of signs": (Function(lambda _, x: x * (x > 0).float().mean()), DEPEND, True),
    "fixed shuffle": (Function(lambda _, x: x[[1, 0, 3, 2, 5, 4]]), DEPEND, True),
    "random shuffle": (Function(lambda _, x: x[torch.randperm(len(x))]), DEPEND, True),
    "what the first sees of the last": (
        Function(lambda _, x: torch.cat([x[:1] + x[-1:], x[1:]]) + torch.rand(())),
        DEPEND,
        True,
    ),
    "attention over the batch": (Function(lambda _, x: (x @ x.T).softmax(1) @ x), DEPEND, True),
    "batch as time": (nn.GRU(6, 4), "not one for each sample", True),
    "batch in windows": (
        Function(lambda _, x: x.view(3, 2, 6).flip(1).reshape(6, 6)),
        DEPEND,
        True,
    ),
    "windows of a fixed number": (
        Function(lambda _, x: (x.view(-1, 2, 6) * torch.tensor([[[1.0], [2.0]]])).view_as(x)),
        "samples are changed or missing",
        True,
    ),
    "number of samples": (Function(lambda _, x: x / len(x)), OTHER, True),
    "control flow": (Function(by_mean), DEPEND, True),
    "memory bank": (Function(remembers, bank=bank()), "updates its buffers", True),
    "moving average": (Function(averages, bank=bank()), "updates its buffers", True),
    "counter": (Function(counts, calls=0), "attribute 'calls' each time", True),
    "list that grows": (Function(grows, rows=[]), "attribute 'rows' each time", True),
    "loss left in an attribute": (Function(leaves), "attribute 'loss' is that of the batch", True),
    "generator of its own": (
        Function(lambda self, x: x + torch.rand(6, generator=self.own), own=torch.Generator()),
        "draws from a generator of its own",
        True,
    ),
    "random numbers of NumPy": (
        Function(lambda _, x: x * float(np.random.rand())),
        "share random numbers",
        True,
    ),
    "random sizes of Python": (
        Function(lambda _, x: x[:, : random.randrange(1, 7)] * random.random()),
        "share random numbers",
        True,
    ),
    "one random number": (Function(lambda _, x: x * torch.rand(())), "share random", True),
    "layers dropped at random": (
        Function(lambda _, x: x if torch.rand(()) < 0.1 else x * 2),
        "share random numbers",
        True,
    ),
    "in place": (Function(lambda _, x: x.mul_(2)), "writes to its arguments", False),
    "in place, and no change": (nn.ReLU(inplace=True), "writes to its arguments", False),
    "a state with the layers first": (nn.LSTM(6, 4, batch_first=True), "not one for each", True),
    "scalar": (Function(lambda _, x: x.sum()), "not one for each sample", True),
    "scalar beside": (Function(lambda _, x: (x * 2, x.mean())), "not one for each sample", True),
    "length beside": (Function(lambda _, x: (x * 2, len(x))), OTHER, True),
    "its argument": (Function(lambda _, x: x.view(6, 2, 3)), "views of its arguments", True),
    "no tensors": (Function(lambda _, x: x.tolist()), "no tensors", False),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_samples_is_refused_with_the_reason(name):
    model, reason, repeats = MIXING[name]
    found = finding(model, SAMPLES.clone())
    assert reason in found.reason
    assert found.repeats == repeats


def test_integers_that_mix():
    tokens = torch.tensor([[1, 2], [3, 4], [0, 1], [2, 2]])
    embedding = nn.Embedding(5, 3)
    assert not finding(embedding, tokens).reason
    counted = Function(lambda _, x: x - torch.bincount(x.flatten(), minlength=5)[x])
    assert finding(counted, tokens).reason == "its " + DEPEND


def test_what_computes_something_else_for_one_sample_runs_in_larger_parts():
    model = Function(lambda _, x: x.sin() if len(x) == 1 else x.cos())
    found = finding(model, torch.randn(6, 3, requires_grad=True))
    assert [found.allows(Segment("", size)) for size in (1, 2)] == [False, True]


def test_masks():
    def attend(_, x, mask):
        return (x @ x.transpose(1, 2) + mask).softmax(-1) @ x

    x, mask = torch.randn(4, 5, 3), torch.zeros(5, 5).triu(1)
    found = finding(Function(attend), x, mask)
    assert not found.reason
    assert (found.samples, found.shared) == (4, (1,))
    # As long as the batch: taken for samples, so to be left alone.
    assert finding(Function(attend), torch.randn(5, 5, 3), mask).reason
    named = finding(Function(attend), x, mask=mask)
    assert (named.reason, named.shared) == ("", (1,))


def test_without_a_batch_there_is_nothing_to_divide():
    assert finding(nn.Linear(6, 6), SAMPLES[:1]).reason == "its arguments have one sample"
    assert finding(Function(lambda _, n: torch.ones(n)), 3).reason == "it has no samples"


@pytest.mark.parametrize(
    ("seconds", "tried"), [(inf, ["0", "1"]), (28, ["0", "1"]), (27, ["0"]), (10, []), (0, [])]
)
def test_what_there_is_no_time_for_does_not_run_in_parts(seconds, tried):
    # By this clock, whatever lies between two looks at it takes a second.
    deadline = Deadline.within(seconds, clock=count().__next__)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    found = examined(model, lambda: model(SAMPLES), dict.fromkeys("01", 2), deadline)
    assert [name for name in "01" if not found[name].reason] == tried
    for name in {*"01"}.difference(tried):
        assert found[name].reason == NO_TIME
        assert not found[name].allows(Segment(name, None))


def test_of_several_calls_the_first_failure_counts():
    layer = Function(lambda _, x, mix: x - x.mean(0) if mix else x)
    twice = Function(lambda self, x: self.layer(self.layer(x, True), False), layer=layer)
    found = examined(twice, lambda: twice(SAMPLES), {"layer": 2, "": 3})
    assert found["layer"].reason == found[""].reason == "its " + DEPEND


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(6), nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        x = self.norm(x)
        return x + self.inner(x, x, x)[0]


class Windows(nn.Module):
    """Attention in shifted windows, which are a batch inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x):
        n, size, _, width = x.shape
        x = x.roll((-1, -1), (1, 2)).view(n, size // 2, 2, size // 2, 2, width).transpose(2, 3)
        x = self.inner(x.reshape(-1, 4, width)).view(n, size // 2, size // 2, 2, 2, width)
        return x.transpose(2, 3).reshape(n, size, size, width).roll((1, 1), (1, 2))


INDEPENDENT = {
    "GroupNorm": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), (3, 5, 5)),
    "InstanceNorm": lambda: (nn.InstanceNorm2d(3), (3, 5, 5)),
    "BatchNorm in evaluation": lambda: (nn.BatchNorm2d(3).eval(), (3, 5, 5)),
    "Dropout": lambda: (nn.Sequential(nn.Linear(6, 6), nn.Dropout()), (6,)),
    "spectral norm": lambda: (nn.utils.spectral_norm(nn.Linear(6, 6)).eval(), (6,)),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), (6,)),
    "recurrent": lambda: (
        Function(lambda self, x: self.layer(x)[0], layer=nn.LSTM(6, 5, batch_first=True)),
        (3, 6),
    ),
    "cell": lambda: (nn.GRUCell(6, 5), (6,)),
    "attention": lambda: (Attention(), (5, 6)),
    "windows": lambda: (Windows(), (4, 4, 6)),
    "encoder": lambda: (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), (5, 6)),
    "double": lambda: (nn.Linear(6, 6).double(), (6,)),
    "bfloat16": lambda: (nn.Linear(64, 64).bfloat16(), (64,)),
    "complex": lambda: (Function(lambda _, x: torch.fft.rfft(x)), (6,)),
    "an object": lambda: (Function(lambda _, x: Holder(x * 2)), (6,)),
    "an object beside": lambda: (Function(lambda _, x: (x * 2, Holder(x * 3))), (6,)),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_what_keeps_samples_apart_is_accepted(name):
    model, shape = INDEPENDENT[name]()
    dtype = next((one.dtype for one in model.parameters()), torch.float32)
    found = finding(model, torch.randn(5, *shape, dtype=dtype))
    assert (found.reason, found.repeats, found.samples) == ("", True, 5)


def diffusion():
    library = pytest.importorskip("diffusers")
    model = library.UNet2DModel(
        *(8, 3, 3),
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        layers_per_block=1,
    )
    return model, (torch.randn(4, 3, 8, 8), torch.tensor([1, 5, 9, 2]))


def convnext():
    settings = {"hidden_sizes": [8, 8], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.1}
    return transformers("ConvNextModel", **settings), (torch.randn(4, 3, 32, 32),)


def wav2vec2():
    model = transformers("Wav2Vec2Model", **SPEECH, feat_extract_norm="layer", layerdrop=0.0)
    return model, (torch.randn(4, 400),)


def segresnet():
    settings = {"in_channels": 1, "out_channels": 2, "blocks_down": (1, 1), "blocks_up": (1,)}
    return monai("SegResNet", init_filters=8, **settings), (torch.randn(4, 1, 8, 8, 8),)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("network", "names"),
    [
        (diffusion, ["", "mid_block", "up_blocks.1"]),
        (convnext, ["", "encoder", "encoder.stages.1"]),
        (wav2vec2, ["", "feature_extractor", "encoder"]),
        (segresnet, ["", "down_layers.1", "up_layers.0"]),
    ],
)
def test_networks_keep_samples_apart_and_so_they_run(network, names):
    model, inputs = network()
    found = examined(model, lambda: model(*inputs), dict.fromkeys(names, 2))
    assert {name: one.reason for name, one in found.items()} == dict.fromkeys(names, "")
    model.eval()
    whole = [one for one in torch.utils._pytree.tree_leaves(model(*inputs)) if torch.is_tensor(one)]
    for name in names:
        segment_(model, [Segment(name, 3, shared=found[name].shared)])
        parts = torch.utils._pytree.tree_leaves(model(*inputs))
        for a, b in zip((one for one in parts if torch.is_tensor(one)), whole, strict=True):
            assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("name", ["BatchNorm", "moving average", "counter", "generator of its own"])
def test_nothing_is_changed_but_by_the_step_itself(name):
    model = MIXING[name][0]
    if name == "counter":
        model.calls = 0
    if name == "generator of its own":
        model.own.manual_seed(3)
    once = copy.deepcopy(model)
    if name == "generator of its own":
        once.own = torch.Generator().manual_seed(3)
    twins = []
    for one, watch in ((model, True), (once, False)):
        torch.manual_seed(4), random.seed(4), np.random.seed(4)
        x = SAMPLES.clone().requires_grad_()
        result = []

        def step(one=one, x=x, result=result):
            result.append(one(x) + torch.rand(6) + random.random() + np.random.rand())

        examined(one, step, {"": 2}) if watch else step()
        result[0].sum().backward()
        state = [*one.buffers(), *one.parameters()]
        states = [torch.get_rng_state(), *([one.own.get_state()] if name.startswith("gen") else [])]
        twins.append(
            [x, x.grad, result[0], *state, *states, torch.tensor(getattr(one, "calls", 0))]
        )
        assert "forward" not in vars(one)
    assert all(torch.equal(a, b) for a, b in zip(*twins, strict=True))
