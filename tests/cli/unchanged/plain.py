"""A loop as in a tutorial; nothing guards it from being imported."""

import torch
from meter import STEPS, Meter, data, network
from torch import nn

model, meter = network(), Meter()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
images, labels = data()
for _ in range(STEPS):
    meter.step()
    optimizer.zero_grad()
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
meter.end()
