"""Models that people train, converted and trained next to their originals from the same seed.

Weights are random and sizes tiny; nothing is downloaded. The plans are drawn by chance, so splits
and algorithms occur that tuning would seldom choose. A model whose package is missing is skipped
by name.
"""

from __future__ import annotations

import copy
import random
import runpy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from packaged import Network, hugging_face, medical
from torch import Tensor, nn

import ucudnn

STEPS = 3


IMAGES, VOLUMES = (3, 3, 32, 32), (2, 1, 16, 16, 16)
SPACE = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
# Residual blocks of two convolutions.
RESNET = hugging_face(
    "ResNetForImageClassification",
    *IMAGES,
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 1],
    layer_type="basic",
)
# 7x7 depthwise convolutions, and patches.
CONVNEXT = hugging_face(
    "ConvNextForImageClassification", *IMAGES, hidden_sizes=[8, 16], depths=[1, 2], num_stages=2
)
# Segmentation: overlapping patches, depthwise convolutions between linear layers, dropout.
SEGFORMER = hugging_face(
    "SegformerForSemanticSegmentation",
    *IMAGES,
    depths=[1, 1, 1, 1],
    hidden_sizes=[8, 8, 16, 16],
    num_attention_heads=[1, 1, 2, 2],
    mlp_ratios=[2, 2, 2, 2],
    decoder_hidden_size=8,
)
# Convolutions of standardised weights: a subclass that calls functional.conv2d itself.
BIT = hugging_face(
    "BitForImageClassification",
    *IMAGES,
    embedding_size=32,
    hidden_sizes=[32, 64],
    depths=[1, 1],
    num_groups=4,
)
# It goes up by transposed convolutions.
UNET = medical("UNet", *VOLUMES, **SPACE, channels=(4, 8, 16), strides=(2, 2), num_res_units=1)
SEGRESNET = medical(
    "SegResNet", *VOLUMES, **SPACE, init_filters=8, blocks_down=(1, 1), blocks_up=(1,)
)
# nnU-Net's network.
DYNUNET = medical(
    "DynUNet",
    *VOLUMES,
    **SPACE,
    kernel_size=[3, 3, 3],
    strides=[1, 2, 2],
    upsample_kernel_size=[2, 2],
    filters=[4, 8, 16],
)
# Those with convolutions that convert_ can swap.
SWAPPABLE = (RESNET, CONVNEXT, SEGFORMER, UNET, SEGRESNET, DYNUNET)


# Libraries that warn of themselves; what ucudnn warns of is still an error.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    *(pytest.mark.filterwarnings(f"ignore:::{library}") for library in ("transformers", "monai")),
]


def output(model: nn.Module, x: Tensor) -> Tensor:
    """The model's output as one tensor."""
    y = model(x)
    return y if isinstance(y, Tensor) else y.logits


def train(model: nn.Module, network: Network) -> list[Tensor]:
    """The losses of some steps."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for seed in range(STEPS):
        torch.manual_seed(seed)  # of dropout
        loss = output(model, network.input(seed)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(
    ("network", "way"),
    [
        *((network, "converted") for network in SWAPPABLE),
        *((network, "installed") for network in (*SWAPPABLE, BIT)),
    ],
    ids=lambda one: getattr(one, "name", one),
)
@pytest.mark.parametrize("seed", range(2))
def test_it_trains_as_the_original(network, seed, way, random_plan):
    model, original = network.make(), network.make()
    plan = random_plan(model, network.input(), random.Random(seed))
    if way == "converted":
        conversion = ucudnn.convert_(model, plan)
        assert conversion.swapped
        assert not conversion.unplanned
    with ucudnn.installed(plan) if way == "installed" else nullcontext():
        losses = train(model, network)
    torch.testing.assert_close(losses, train(original, network), rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_a_pretrained_model_is_saved_and_loaded_as_ever(random_plan, tmp_path):
    model = RESNET.make().eval()
    plan = random_plan(model, RESNET.input(), random.Random(0))
    ucudnn.convert_(model, plan)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert not [
        name for name, module in loaded.named_modules() if "ucudnn" in type(module).__module__
    ]
    with torch.no_grad():
        torch.testing.assert_close(output(model, RESNET.input()), output(loaded, RESNET.input()))
    assert ucudnn.convert_(loaded, plan).swapped


@pytest.mark.parametrize("network", [RESNET, CONVNEXT, UNET], ids=lambda network: network.name)
@pytest.mark.parametrize("way", ["converted", "installed"])
def test_channels_last_under_autocast(network, way, random_plan):
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}[len(network.shape)]
    x = network.input().to(memory_format=layout)
    exact = network.make().double()
    exact_x = x.double()
    output(exact, exact_x).square().mean().backward()
    errors = []
    for follows in (True, False):
        model, plan = network.make().to(memory_format=layout), None
        with torch.autocast("cpu", torch.bfloat16):
            if follows:
                plan = random_plan(model, x, random.Random(0))
                if way == "converted":
                    ucudnn.convert_(model, plan)
            with ucudnn.installed(plan) if follows and way == "installed" else nullcontext():
                output(model, x).float().square().mean().backward()
        errors.append(distance(model, exact))
    assert errors[0] < 1.5 * errors[1] + 1e-3


def distance(model: nn.Module, exact: nn.Module) -> float:
    """The relative error of all gradients together."""
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    grads = [(p.grad.double(), q.grad) for p, q in pairs if q.grad is not None]
    square = sum((ours - theirs).square().sum().item() for ours, theirs in grads)
    return (square / sum(theirs.square().sum().item() for _, theirs in grads)) ** 0.5


# Inductor uses what torch itself calls deprecated
compiled = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


@pytest.fixture
def _own_compilations(tmp_path, monkeypatch) -> None:
    """Nothing that another process compiled, or left half written."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()


@pytest.mark.usefixtures("_own_compilations")
@compiled
def test_compiled_whole_a_converted_resnet_gives_the_same_numbers(repository, random_plan):
    models = runpy.run_path(str(repository / "examples" / "models.py"))
    torch.manual_seed(0)
    # a block of each kind: compilation takes as long as there are different layers
    stages = [models["basic"](64, 64, 1), models["basic"](64, 128, 2)]
    model = models["_resnet"](stages, 128, 10)
    # in float64, because the gradients of so few samples lose most of float32's digits
    model, x = model.double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    eager = step(copy.deepcopy(model), x)
    assert ucudnn.convert_(model, random_plan(model, x, random.Random(0))).swapped
    for name, results in {
        "converted": step(copy.deepcopy(model), x),
        "compiled": step(torch.compile(model, fullgraph=True), x),
    }.items():
        torch.testing.assert_close(results, eager, rtol=1e-7, atol=1e-7, msg=name)


def step(model: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The loss and all gradients of one step."""
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]
