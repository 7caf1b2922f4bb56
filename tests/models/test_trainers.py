"""The examples of trainers: each script runs by a plan and trains as plain torch does."""

from __future__ import annotations

import os
import random
import re
import runpy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

SHAPE, STEPS = (16, 3, 32, 32), 3
# script -> the package it needs, and what in it is the network
pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPTS = {
    "train_loop.py": (None, "network"),
    "train_lightning.py": ("pytorch_lightning", "Classifier"),
    "train_transformers.py": ("transformers", "network"),
}


def seeded(seed: int):
    torch.manual_seed(seed)
    return torch.randn(SHAPE), torch.randint(10, SHAPE[:1])


@pytest.mark.parametrize("memory_format", ["keep", "channels_last"])
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_trainer_follows_the_plan(script, memory_format, repository, random_plan, tmp_path):
    package, network = SCRIPTS[script]
    if package is not None:
        pytest.importorskip(package, reason=f"the extra `test` brings {package}")
    example = runpy.run_path(str(repository / "examples" / script))
    model = example[network]()
    if memory_format == "channels_last":
        model.to(memory_format=torch.channels_last)
    plan = random_plan(model, torch.empty(SHAPE), random.Random(0))
    plan = replace(plan, memory_format=memory_format)
    plan.save(tmp_path / "plan.json")
    script_path = repository / "examples" / script
    finished = subprocess.run(
        [sys.executable, script_path, "--steps", str(STEPS), "--plan", tmp_path / "plan.json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    assert finished.returncode == 0, finished.stderr
    assert re.search(r"^[1-9]\d* layers follow the plan, .* 0 are not planned", finished.stdout)
    losses = [float(loss) for loss in re.findall(r"step \d+ loss (\S+)", finished.stdout)]
    assert losses == pytest.approx(plain_losses(example[network], script), abs=2e-4)


def plain_losses(network, script):
    """What plain torch makes of the same data, weights and optimizer."""
    images, labels = seeded(0)
    model, losses = network().train(), []
    if script == "train_transformers.py":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        scores = model(images)
        scores = scores if isinstance(scores, torch.Tensor) else scores.logits
        loss = functional.cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        if script == "train_transformers.py":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses
