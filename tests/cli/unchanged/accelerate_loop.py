"""Accelerate, in mixed precision."""

import torch
from accelerate import Accelerator
from meter import STEPS, Meter, data, network
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
model, meter = network(), Meter()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(*data()), batch_size=64)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(STEPS):
    for images, labels in loader:
        meter.step()
        loss = cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item())
meter.end()
accelerator.end_training()
