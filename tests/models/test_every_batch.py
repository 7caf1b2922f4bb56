"""Saved plans at every batch: each is real, and left to torch only where the time was over."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaged import SPEECH, Network, hugging_face, medical, tensors_in
from torch import nn

import ucudnn
from ucudnn.check import check

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> nn.Module:
    return runpy.run_path(str(EXAMPLES / "models.py"))[name](10)


def autoencoder(_: str) -> nn.Module:
    """Strides, dilation, a transposed convolution, and a filter that is not square."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, 2, 2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=2, dilation=2),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1),
        nn.ReLU(),
        nn.Conv2d(8, 3, (3, 1), padding="same"),
    )


SPACE: dict[str, Any] = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
PLANES = {**SPACE, "spatial_dims": 2}
RESIDUAL: dict[str, Any] = {"channels": (16, 32, 64, 128), "strides": (2, 2, 2)}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
# Each with a budget that excludes some of torch's own convolutions.
NETWORKS = {
    "unet_3d": (medical("UNet", 4, 1, 32, 32, 32, **SPACE, num_res_units=2, **RESIDUAL), "100MiB"),
    "resnet18": (Network(example, "resnet18", (6, 3, 64, 64), {}), "150MiB"),
    "autoencoder": (Network(autoencoder, "autoencoder", (9, 3, 48, 48), {}), "8MiB"),
    "attention_unet_3d": (
        medical("AttentionUnet", 3, 1, 16, 16, 16, **SPACE, channels=(4, 8), strides=(2,)),
        "10MiB",
    ),
    "basic_unet": (
        medical("BasicUNet", 6, 1, 64, 64, **PLANES, features=(8, 8, 16, 16, 32, 8)),
        "50MiB",
    ),
    "mobilenet": (hugging_face("MobileNetV2Model", 5, 3, 32, 32, depth_multiplier=0.25), "10MiB"),
    "convnext": (hugging_face("ConvNextV2Model", 7, 3, 32, 32, **CONVNEXT), "10MiB"),
    "wav2vec": (hugging_face("Wav2Vec2Model", 3, 800, **SPEECH), "10MiB"),
}
SETTINGS: dict[str, Callable[[str], dict[str, Any]]] = {
    "default": lambda _: {},
    "short time": lambda _: {"time_budget_s": 4},
    "memory budget": lambda budget: {"memory_budget": budget},
    "limit and short time": lambda _: {"time_budget_s": 4, "workspace_limit": "1MiB"},
}
# Of the rest each takes half a minute.
EACH_PUSH = {
    ("unet_3d", "short time"),
    ("unet_3d", "limit and short time"),
    ("autoencoder", "default"),
    ("wav2vec", "memory budget"),
}


def cases() -> Iterator[Any]:
    for name in NETWORKS:
        for setting in SETTINGS:
            marks = [pytest.mark.slow] if (name, setting) in EACH_PUSH else []
            yield pytest.param(name, setting, marks=marks)


@pytest.mark.filterwarnings(
    "ignore:::transformers",
    "ignore:::monai",
    # The time may not suffice for all kernels, or for all batches of one.
    "ignore::ucudnn.errors.UntunedWarning",
    "ignore::ucudnn.errors.UnplannedWarning",
    "ignore:.* was left out of the plan",
)
@pytest.mark.parametrize(("name", "setting"), list(cases()))
def test_a_saved_plan_computes_every_batch(name: str, setting: str, tmp_path: Path) -> None:
    network, budget = NETWORKS[name]
    # In a batch of one sample some statistics of a BatchNorm would be of one element.
    model, x = network.make().eval(), network.input()
    ucudnn.tune(model, x, ucudnn.Config(**SETTINGS[setting](budget))).save(tmp_path / "plan.json")
    plan = ucudnn.Plan.load(tmp_path / "plan.json")
    for kernel in plan.kernels:
        # On a busy machine a short time ends before the last batch is known to fit.
        missing = [str(kernel.problem.with_batch(n)) for n in kernel.uncovered()]
        assert not missing or missing[-1] in plan.left_out
    assert not [found for found in check(plan, canaries=0) if found.is_true is False]
    if setting in ("default", "memory budget"):
        assert not plan.left_out
        assert not [kernel.problem for kernel in plan.kernels if kernel.uncovered()]
        plan = replace(plan, config=replace(plan.config, unplanned="error"))
    with ucudnn.installed(plan):
        for batch in range(1, len(x) + 1):
            outputs = tensors_in(model(x[:batch]))
            sum(y.square().mean() for y in outputs).backward()
