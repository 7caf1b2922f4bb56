"""Train a model of Hugging Face by its Trainer; one line makes the convolutions follow a plan.

python examples/train_transformers.py [--plan plan.json]
"""

from __future__ import annotations

import argparse
import tempfile
from argparse import RawTextHelpFormatter

import torch
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import ucudnn


class PrintLoss(TrainerCallback):
    """Print what the Trainer logs of the loss."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Called after every step here."""
        if logs and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.4f}")


def network() -> ResNetForImageClassification:
    """A small ResNet with random weights."""
    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10
    )
    return ResNetForImageClassification(config)


def main() -> None:
    """Tune, train, print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plan", help="a plan's file; default: tune now")
    arguments = parser.parse_args()

    set_seed(0)
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    model = network()

    if arguments.plan:
        conversion = ucudnn.convert_(model, ucudnn.Plan.load(arguments.plan))
    else:
        conversion = ucudnn.tune_(model, images, ucudnn.Config(workspace_limit="256KiB"))
    print(conversion)

    samples = [
        {"pixel_values": image, "labels": label}
        for image, label in zip(images, labels, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(model, settings, train_dataset=samples, callbacks=[PrintLoss()]).train()


if __name__ == "__main__":
    main()
