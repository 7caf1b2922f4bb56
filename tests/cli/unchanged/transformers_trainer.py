"""The Trainer of Transformers."""

import tempfile

import torch
from meter import BATCH, STEPS, Meter, data
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

meter = Meter()


class Count(TrainerCallback):
    """Counts memory, and prints losses."""

    def on_step_begin(self, *_, **__):
        """A step begins."""
        meter.step()

    def on_log(self, args, state, control, logs=None, **_):
        """A step has ended."""
        if "loss" in logs:
            print("loss", float(logs["loss"]))

    def on_train_end(self, *_, **__):
        """The last step has ended."""
        meter.end()


if __name__ == "__main__":
    set_seed(0)
    config = ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, num_labels=10)
    images, labels = data()
    samples = [
        {"pixel_values": image, "labels": label}
        for image, label in zip(images.repeat(1, 1, 2, 2), labels, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        model = ConvNextForImageClassification(config)
        torch.manual_seed(1)
        Trainer(model, settings, train_dataset=samples, callbacks=[Count()]).train()
