"""Networks of transformers and MONAI whose every convolution is divided and computed by force.

Outputs and all gradients of a step in double precision are torch's own. Weights are random and
sizes tiny; nothing is downloaded. `pytest --complete` tries every network in every way.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from packaged import NARROW, SPEECH, Network, hugging_face, medical, tensors_in
from torch import Tensor, nn

PLANES = {"spatial_dims": 2, "in_channels": 1}
SPACE = {"spatial_dims": 3, "in_channels": 1}
NETWORKS = (
    hugging_face(
        "ResNetModel", 3, 3, 32, 32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2]
    ),
    hugging_face("MobileNetV2Model", 3, 3, 32, 32, depth_multiplier=0.25),
    hugging_face("Wav2Vec2Model", 3, 800, **SPEECH),
    medical(
        "AttentionUnet", 2, 1, 16, 16, 16, **SPACE, out_channels=2, channels=(4, 8), strides=(2,)
    ),
    hugging_face("MobileNetV1Model", 3, 3, 32, 32, depth_multiplier=0.25),
    hugging_face(
        "RegNetModel",
        *(3, 3, 32, 32),
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        groups_width=4,
    ),
    hugging_face(
        "ConvNextV2Model", 3, 3, 32, 32, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2
    ),
    hugging_face(
        "EfficientNetModel",
        *(3, 3, 32, 32),
        width_coefficient=0.25,
        depth_coefficient=0.1,
        hidden_dim=320,
    ),
    medical("DenseNet121", 3, 1, 32, 32, **PLANES, out_channels=2, init_features=8, growth_rate=4),
    hugging_face("PoolFormerModel", 3, 3, 32, 32, hidden_sizes=[8, 8, 16, 16], depths=[1] * 4),
    hugging_face("CvtModel", 3, 3, 32, 32, embed_dim=[8, 16, 24], num_heads=[1, 2, 3]),
    hugging_face("MobileViTModel", 3, 3, 32, 32, hidden_sizes=[16, 24, 32]),
    hugging_face("ViTModel", 3, 3, 32, 32, image_size=32, patch_size=8, **NARROW),
    hugging_face("HubertModel", 3, 800, **SPEECH),
    hugging_face("Data2VecAudioModel", 3, 800, **SPEECH),
    medical("BasicUNet", 2, 1, 32, 32, **PLANES, out_channels=2, features=(4, 4, 4, 4, 4, 4)),
    medical("SegResNetDS", 2, 1, 16, 16, 16, **SPACE, out_channels=2, init_filters=8),
    medical("HighResNet", 2, 1, 8, 8, 8, **SPACE, out_channels=2),
    medical("SEResNet50", 2, 1, 32, 32, **PLANES, num_classes=2, layers=(1, 1, 1, 1), inplanes=16),
    medical(
        "EfficientNetBN", 2, 1, 32, 32, model_name="efficientnet-b0", pretrained=False, **PLANES
    ),
)
DIVISIONS = ("whole", "single samples", "uneven batches", "single rows", "uneven rows")
ALGORITHMS = ("torch_default", "slow_conv2d", "im2col_gemm", "gemm", "fft", "mixed")
# Without --complete: networks, and ways of each.
FEW, WAYS = 4, 2

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    *(pytest.mark.filterwarnings(f"ignore:::{library}") for library in ("transformers", "monai")),
]


def step(network: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Outputs and gradients, by name."""
    network.zero_grad()
    x = x.clone().requires_grad_()
    outputs = tensors_in(network(x))
    sum(y.square().mean() for y in outputs).backward()
    named = {f"output {index}": y.detach() for index, y in enumerate(outputs)}
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return {**named, **gradients, "input": x.grad}


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_divided_by_force_it_computes_as_torch_does(
    network: Network,
    forced: Callable[[str, str], AbstractContextManager[Counter[str]]],
    request: pytest.FixtureRequest,
) -> None:
    ways = [(division, algorithm) for division in DIVISIONS for algorithm in ALGORITHMS]
    if not request.config.getoption("--complete"):
        if network not in NETWORKS[:FEW]:
            pytest.skip("only with --complete")
        ways = random.Random(network.name).sample(ways, WAYS)
    model, x = network.make().double().eval(), network.input(dtype=torch.float64)
    truth = step(model, x)
    for way in ways:
        with forced(*way) as used:
            found = step(model, x)
        assert used, way
        for name, exact in truth.items():
            error = (found[name] - exact).norm()
            scale = max(exact.norm(), 1e-6 * largest(truth))
            assert error <= 1e-8 * scale, f"{way}: {name} is off by {error / scale:.1e}"


def largest(tensors: dict[str, Tensor]) -> float:
    """The largest norm: a gradient that is zero but for rounding is compared with it."""
    return max(float(tensor.norm()) for tensor in tensors.values())
