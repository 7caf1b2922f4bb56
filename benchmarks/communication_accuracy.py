"""What ways of exchanging gradients cost in accuracy: scikit-learn's digits, several seeds.

pip install scikit-learn
python benchmarks/communication_accuracy.py --out accuracy.json

A small convolutional network learns 8x8 images of digits on simulated ranks in one process; tests
show that real ranks compute the same. Each way is trained at every rate of one grid. Its best rate
is the one with the best mean accuracy on validation images, and the table has the accuracy on test
images at that rate: mean and range over seeds. All ways get the same number of runs and steps.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ucudnn.distributed.codecs import Codec, OneBit, Stochastic, TopK

RATES = [0.01, 0.03, 0.1, 0.3]
MOMENTUM, BATCH = 0.9, 32  # the batch of all ranks together
Gradients = list[Tensor]


def network() -> nn.Module:
    convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 10))


class Job:
    """Ranks of a job, one after the other in this process, each with a part of a batch.

    Args:
        ranks: how many.
        rate: of learning.
    """

    def __init__(self, ranks: int, rate: float) -> None:
        self.model, self.rate, self.ranks = network(), rate, ranks
        self.optimizer = self.sgd(self.model)
        self.steps = 0

    def sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        """An optimizer of its own for each model."""
        return torch.optim.SGD(model.parameters(), lr=self.rate, momentum=MOMENTUM)

    def gradients(self, model: nn.Module, images: Tensor, labels: Tensor) -> Gradients:
        """Gradients of a part of a batch."""
        loss = cross_entropy(model(images), labels)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    def parts(self, images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The part of each rank."""
        return list(zip(images.chunk(self.ranks), labels.chunk(self.ranks), strict=True))

    def average(self, every: Sequence[Gradients]) -> Gradients:
        """What is applied, of the gradients of each rank."""
        return [torch.stack(each).mean(0) for each in zip(*every, strict=True)]

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on one batch of all ranks."""
        every = [self.gradients(self.model, *part) for part in self.parts(images, labels)]
        for one, gradient in zip(self.model.parameters(), self.average(every), strict=True):
            one.grad = gradient
        self.optimizer.step()
        self.steps += 1

    def trained(self) -> nn.Module:
        """What is tested."""
        return self.model


class Halved(Job):
    """Gradients are rounded to bfloat16, and so is their sum."""

    def average(self, every: Sequence[Gradients]) -> Gradients:
        """What is applied, of the gradients of each rank."""
        sums = [sum(one.bfloat16() for one in each) for each in zip(*every, strict=True)]
        return [one.float() / self.ranks for one in sums]


class Coded(Job):
    """Gradients are messages of a codec, with feedback if it has any.

    Args:
        codec: of the messages.
        ranks: how many.
        rate: of learning.
    """

    def __init__(self, codec: Codec, ranks: int, rate: float) -> None:
        super().__init__(ranks, rate)
        self._codec = codec
        self._left: dict[tuple[int, int], Tensor] = {}

    def average(self, every: Sequence[Gradients]) -> Gradients:
        """What is applied, of the gradients of each rank."""
        sent = [[self._sent((r, n), one) for n, one in enumerate(g)] for r, g in enumerate(every)]
        return super().average(sent)

    def _sent(self, place: tuple[int, int], gradient: Tensor) -> Tensor:
        flat = gradient.flatten() + self._left.get(place, 0)
        if self._codec.size_bytes(len(flat)) >= flat.nbytes:
            return flat.view_as(gradient)
        sent = self._codec.decode(self._codec.encode(flat), flat)
        if self._codec.has_feedback:
            self._left[place] = flat - sent
        return sent.view_as(gradient)


class Late(Job):
    """Gradients of the step before."""

    def __init__(self, ranks: int, rate: float) -> None:
        super().__init__(ranks, rate)
        self._waiting: deque[Gradients] = deque()

    def average(self, every: Sequence[Gradients]) -> Gradients:
        """What is applied, of the gradients of each rank."""
        self._waiting.append(super().average(every))
        if len(self._waiting) == 1:
            return [torch.zeros_like(one) for one in self._waiting[0]]
        return self._waiting.popleft()


class Apart(Job):
    """Each rank trains by itself; every `period` steps all get, or are drawn to, a mean.

    Args:
        period: steps between exchanges.
        beta: of elastic averaging; None: all ranks get the mean (local SGD).
        ranks: how many.
        rate: of learning.
    """

    def __init__(self, period: int, beta: float | None, ranks: int, rate: float) -> None:
        super().__init__(ranks, rate)
        self._models = [copy.deepcopy(self.model) for _ in range(ranks)]
        self._optimizers = [self.sgd(one) for one in self._models]
        self._period, self._beta = period, beta

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on one batch of all ranks."""
        rows = zip(self._models, self._optimizers, self.parts(images, labels), strict=True)
        for model, optimizer, part in rows:
            for one, gradient in zip(model.parameters(), self.gradients(model, *part), strict=True):
                one.grad = gradient
            optimizer.step()
        self.steps += 1
        if self.steps % self._period == 0:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for centre, *every in zip(
            self.model.parameters(), *(one.parameters() for one in self._models), strict=True
        ):
            middle = torch.stack(every).mean(0)
            alpha = 1.0 if self._beta is None else self._beta / self.ranks
            target = middle if self._beta is None else centre.clone()
            for one in every:
                one.lerp_(target, alpha)
            centre.lerp_(middle, 1.0 if self._beta is None else self._beta)


WAYS: dict[str, Callable[[int, float], Job]] = {
    "as torch does it": Job,
    "gradients in bfloat16": Halved,
    "top-k, 1 %": lambda ranks, rate: Coded(TopK(0.01), ranks, rate),
    "one bit": lambda ranks, rate: Coded(OneBit(), ranks, rate),
    "ternary": lambda ranks, rate: Coded(Stochastic(), ranks, rate),
    "average every 8 steps": lambda ranks, rate: Apart(8, None, ranks, rate),
    "elastic, every 4 steps": lambda ranks, rate: Apart(4, 0.9, ranks, rate),
    "delayed by 1 step": Late,
}


def data(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Images and labels for training, validation and test: other ones for each seed."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    parts = order.split([1152, 320, len(order) - 1472])
    return [(images[part], labels[part]) for part in parts]


def train(
    make: Callable[[int, float], Job], ranks: int, rate: float, seed: int, epochs: int
) -> tuple[float, float]:
    """Accuracy on validation and test images after some epochs."""
    torch.manual_seed(seed)
    (images, labels), *others = data(seed)
    job = make(ranks, rate)
    for _ in range(epochs):
        for places in torch.randperm(len(images)).split(BATCH):
            job.step(images[places], labels[places])
    model = job.trained()
    with torch.no_grad():
        found = [float((model(x).argmax(1) == y).float().mean()) for x, y in others]
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, help="a JSON file with all accuracies")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = [(way, rate, seed) for way in WAYS for rate in RATES for seed in range(arguments.seeds)]
    found = {
        (way, rate, seed): train(WAYS[way], arguments.ranks, rate, seed, arguments.epochs)
        for way, rate, seed in track(runs)
    }
    if arguments.out:
        rows = [[*place, *accuracy] for place, accuracy in found.items()]
        arguments.out.write_text(json.dumps(rows, indent=0) + "\n")
    table = Table(
        title=f"Digits, {arguments.ranks} simulated ranks, {arguments.epochs} epochs of batches of "
        f"{BATCH}, {arguments.seeds} seeds, {len(RATES)} rates each"
    )
    for name in ("way", "best rate", "test accuracy, mean", "lowest", "highest"):
        table.add_column(name, justify="left" if name == "way" else "right")
    seeds = range(arguments.seeds)
    for way in WAYS:
        best = max(RATES, key=lambda rate: mean(found[way, rate, seed][0] for seed in seeds))
        tested = [found[way, best, seed][1] for seed in seeds]
        cells = [f"{100 * one:.1f} %" for one in (mean(tested), min(tested), max(tested))]
        table.add_row(way, f"{best:g}", *cells)
    Console(width=100, highlight=False).print(table)


if __name__ == "__main__":
    main()
