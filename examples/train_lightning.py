"""Train by PyTorch Lightning; a callback makes the convolutions follow a plan.

python examples/train_lightning.py [--plan plan.json]
"""

from __future__ import annotations

import argparse
from argparse import RawTextHelpFormatter
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ucudnn


class FollowPlan(Callback):
    """Converts a module before Lightning makes its optimizers and restores a checkpoint.

    Args:
        plan: made for the module, or None: tune when the module is there.
        example_inputs: what the module's forward takes, with the largest batch.
        config: the settings to tune with.
    """

    def __init__(
        self,
        plan: ucudnn.Plan | None = None,
        example_inputs: Any = None,
        config: ucudnn.Config | None = None,
    ) -> None:
        self.plan = plan
        self.example_inputs = example_inputs
        self.config = config

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lightning calls this first, whatever it is asked for."""
        if self.plan is None:
            self.plan = ucudnn.tune(pl_module, self.example_inputs, self.config)
        print(ucudnn.convert_(pl_module, self.plan))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lightning calls this last: the module is what it was."""
        ucudnn.revert_(pl_module)


class Classifier(LightningModule):
    """A network as anyone would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Scores of ten classes."""
        scores: Tensor = self.network(images)
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        images, labels = batch
        loss = functional.cross_entropy(self(images), labels)
        print(f"step {self.global_step} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Tune, train, print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plan", help="a plan's file; default: tune now")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    plan = ucudnn.Plan.load(arguments.plan) if arguments.plan else None
    follow_plan = FollowPlan(plan, images, ucudnn.Config(workspace_limit="256KiB"))
    trainer = Trainer(
        callbacks=[follow_plan],
        max_epochs=arguments.steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(TensorDataset(images, labels), batch_size=16))


if __name__ == "__main__":
    main()
