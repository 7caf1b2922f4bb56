"""The models of diffusers, whose configuration refuses changes and answers for missing attributes.

Weights are random and sizes tiny; nothing is downloaded. Skipped where diffusers is missing.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ucudnn

diffusers = pytest.importorskip("diffusers", reason="the extra `test` brings diffusers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:::diffusers"),
]
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def unet() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )
    return model, {"sample": X, "timestep": 3}


def conditional_unet() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    text = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    return model, {"sample": X, "timestep": 3, "encoder_hidden_states": text}


def autoencoder() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=2, sample_size=8
    )
    return model, {"sample": X}


def temporal_autoencoder() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.AutoencoderKLTemporalDecoder(
        block_out_channels=(32,), latent_channels=2, sample_size=8
    )
    return model, {"sample": X, "num_frames": 2}


def step(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """The output and all gradients of one step."""
    model.zero_grad()
    y = model(**inputs).sample
    y.square().mean().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("make", [unet, conditional_unet, autoencoder, temporal_autoencoder])
def test_converted_it_computes_the_same_and_back_to_the_bit(make, random_plan):
    torch.manual_seed(0)
    model, inputs = make()
    config, truth = dict(model.config), step(model, inputs)
    plan = random_plan(model, inputs, random.Random(0))
    assert dict(model.config) == config
    conversion = ucudnn.convert_(model, plan)
    assert conversion.swapped
    assert not conversion.unplanned
    for converted in (model, copy.deepcopy(model)):
        torch.testing.assert_close(step(converted, inputs), truth, rtol=1e-3, atol=1e-5)
    ucudnn.revert_(model)
    assert all(map(torch.equal, step(model, inputs), truth))
    with ucudnn.installed(plan):
        torch.testing.assert_close(step(model, inputs), truth, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore::ucudnn.errors.UntunedWarning")
def test_it_is_tuned():
    model, inputs = autoencoder()
    truth = model(**inputs).sample
    conversion = ucudnn.tune_(model, inputs, ucudnn.Config(time_budget_s=2, ops=("fprop",)))
    assert conversion.swapped or conversion.left
    torch.testing.assert_close(model(**inputs).sample, truth, rtol=1e-3, atol=1e-5)
