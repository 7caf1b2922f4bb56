"""A program with a class of its own, epochs, evaluations, dropout, and a smaller last batch."""

from __future__ import annotations

import argparse

import torch
from meter import BATCH, IMAGE, Meter
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    """Random images, made when they are asked for."""

    def __len__(self) -> int:
        return 2 * BATCH + BATCH // 2

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        chance = torch.Generator().manual_seed(index)
        return torch.randn(3, IMAGE, IMAGE, generator=chance), index % 10


class Block(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        return x + self.second(torch.relu(self.norm(self.first(x))))


class Net(nn.Module):
    """A head, blocks, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.dropout = nn.Dropout(0.1)
        self.tail = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Scores of ten classes."""
        x = self.head(images)
        for block in self.blocks:
            x = block(x)
        return self.tail(self.dropout(x.mean((2, 3)))) * scale


def main() -> None:
    """Train for ten epochs of three batches."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    net, meter = Net(), Meter()
    loader = DataLoader(Images(), batch_size=BATCH)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    net.eval()
    with torch.no_grad():
        net(torch.randn(1, 3, IMAGE, IMAGE))
    for _ in range(arguments.epochs):
        net.train()
        for x, y in loader:
            meter.step()
            optimizer.zero_grad()
            loss = cross_entropy(net(x, scale=0.5), y)
            loss.backward()
            optimizer.step()
            print("loss", loss.item())
        net.eval()
        with torch.no_grad():
            net(torch.randn(8, 3, IMAGE, IMAGE))
    meter.end()


if __name__ == "__main__":
    main()
