"""PyTorch Lightning."""

import torch
from meter import BATCH, STEPS, Meter, data, network
from pytorch_lightning import LightningModule, Trainer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):
    """A network, as anyone would write it."""

    def __init__(self):
        super().__init__()
        self.network, self.meter = network(), Meter()

    def forward(self, images):
        """Scores of ten classes."""
        return self.network(images)

    def training_step(self, batch, index):
        """The loss of a batch."""
        images, labels = batch
        loss = cross_entropy(self(images), labels)
        print("loss", loss.item())
        return loss

    def validation_step(self, batch, index):
        """Scores alone."""
        self(batch[0])

    def on_train_batch_start(self, batch, index):
        """A step begins."""
        self.meter.step()

    def on_train_end(self):
        """The last step has ended."""
        self.meter.end()

    def configure_optimizers(self):
        """Adam, and a schedule."""
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]


if __name__ == "__main__":
    loader = DataLoader(TensorDataset(*data()), batch_size=BATCH)
    trainer = Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader, loader)
