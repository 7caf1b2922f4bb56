"""What ranks run in tests of communication: compressed gradients beside a simulation of all ranks.

A rank knows the data of all, so it computes what each of them should send and apply, one after the
other and without a message.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import training
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ucudnn import distributed
from ucudnn.distributed.codecs import Codec

CODECS: dict[str, Codec] = {
    "top-k": distributed.TopK(0.05),
    "all": distributed.TopK(1),
    "one bit": distributed.OneBit(),
    "ternary": distributed.Stochastic(),
}
BATCH, RATE = 4, 0.05


class AllRanks:
    """A model that learns from the messages of all ranks, which are made here.

    Args:
        model: that all ranks start from.
        codec: of the messages.
    """

    def __init__(self, model: nn.Module, codec: Codec) -> None:
        self.model = copy.deepcopy(model)
        self.codec = codec
        self.left: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
        self._steps = 0

    def step(self, batches: Sequence[Sequence[tuple[Tensor, Tensor]]], rate: float = RATE) -> None:
        """One update from the batches of each rank; a rank without any has joined."""
        ranks = len(batches)
        means = {name: torch.zeros_like(one) for name, one in self.model.named_parameters()}
        for rank, mine in enumerate(batches):
            self.model.zero_grad(set_to_none=False)
            for images, labels in mine:
                cross_entropy(self.model(images), labels).backward()
            for number, (name, parameter) in enumerate(self.model.named_parameters()):
                gradient = parameter.grad
                if gradient is None:
                    gradient = torch.zeros_like(parameter)
                place = (self._steps * ranks + rank) * len(means) + number
                means[name] += self._sent(rank, name, gradient, place) / ranks
        self._steps += 1
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.sub_(rate * means[name])

    def _sent(self, rank: int, name: str, gradient: Tensor, seed: int) -> Tensor:
        flat = gradient.flatten().clone()
        if name in self.left[rank]:
            flat += self.left[rank][name]
        if self.codec.size_bytes(len(flat), flat.itemsize) >= flat.nbytes:
            return flat.view_as(gradient)
        chance = torch.Generator().manual_seed(seed)
        sent = self.codec.decode(self.codec.encode(flat, chance), flat)
        if self.codec.has_feedback:
            self.left[rank][name] = flat - sent
        return sent.view_as(gradient)


def network() -> nn.Module:
    return training.network(dtype=torch.float64, norm=False)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    images, labels = training.data(16 * BATCH, torch.float64)
    place = (step * dist.get_world_size() + rank) * BATCH % (16 * BATCH)
    return images[place : place + BATCH], labels[place : place + BATCH]


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    """One step of plain training on a rank's batch."""
    optimizer.zero_grad()
    images, labels = batch(step, rank)
    cross_entropy(model(images.to(next(model.parameters()).dtype)), labels).backward()
    optimizer.step()


def compressed(
    folder: Path, rank: int, codec: str, micro: int = 1, dtypes: int = 1, **options: Any
) -> dict[str, Any]:
    """Train with compressed gradients, and beside it without any message."""
    ranks, steps = dist.get_world_size(), 12
    model = network() if dtypes == 1 else TwoDtypes()
    expected = AllRanks(model, CODECS[codec])
    replica = DistributedDataParallel(model, **options)
    compression = distributed.compress(replica, CODECS[codec], timeout_s=100)
    optimizer = torch.optim.SGD(replica.parameters(), lr=RATE)
    is_replicated = True
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            with replica.no_sync() if part < micro - 1 else nullcontext():
                images, labels = batch(step * micro + part, rank)
                cross_entropy(replica(images), labels).backward()
        optimizer.step()
        every = [[batch(step * micro + part, r) for part in range(micro)] for r in range(ranks)]
        expected.step(every)
        is_replicated = is_replicated and training.is_replicated(replica.module)
    left = compression.state_dict()["left"]
    apart = [float((left[n].flatten() - one).abs().max()) for n, one in expected.left[rank].items()]
    sizes = [(one.numel(), one.itemsize) for one in model.parameters()]
    coded = sum(min(CODECS[codec].size_bytes(n, size), n * size + 7 & ~7) for n, size in sizes)
    return {
        "weights": training.difference(replica.module, expected.model),
        "left": max(apart, default=0.0),
        "names": sorted(left) == sorted(expected.left[rank]),
        "replicated": is_replicated,
        "dense": compression.is_dense,
        "sent": compression.sent_bytes,
        "coded": steps * coded * (ranks - 1),
        "whole": steps * 2 * sum(n * size for n, size in sizes) * (ranks - 1) // ranks,
    }


def joined(folder: Path, rank: int, codec: str) -> dict[str, Any]:
    """Rank 0 has fewer batches; what it has not sent is delivered nevertheless."""
    ranks = dist.get_world_size()
    model = network()
    expected = AllRanks(model, CODECS[codec])
    replica = DistributedDataParallel(model)
    distributed.compress(replica, CODECS[codec], timeout_s=100)
    optimizer = torch.optim.SGD(replica.parameters(), lr=RATE)
    counts = [3 + 2 * one for one in range(ranks)]
    with Join([replica]):
        for step in range(counts[rank]):
            update(replica, optimizer, step, rank)
    for step in range(max(counts)):
        expected.step([[batch(step, r)] if step < counts[r] else [] for r in range(ranks)])
    return {
        "weights": training.difference(replica.module, expected.model),
        "replicated": training.is_replicated(replica.module),
    }


class Switched(nn.Module):
    """Layers side by side, of which a call uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(40, 1).double() for _ in range(2))

    def forward(self, x: Tensor, which: Sequence[int]) -> Tensor:
        return sum(self.layers[n](x) for n in which)


def uses(step: int, rank: int) -> list[list[int]]:
    """The layers of each micro-step: of all, of one rank, of none, and only before the last."""
    kinds = ([[0, 1]], [[rank % 2]], [[0]], [[0, 1], [0]], [[0]], [[1]])
    return kinds[step % len(kinds)]


def unused(
    folder: Path, rank: int, late: int | None = None, to_none: bool = True, **options: Any
) -> dict[str, Any]:
    """Layers that ranks leave out in some steps: compressed by top-k, or `late` by some steps."""
    model, codec, ranks = Switched(), CODECS["top-k"], dist.get_world_size()
    weights = [layer.weight.detach().clone() for layer in model.layers]
    left = torch.zeros(ranks, 2, 40, dtype=torch.float64)
    waiting, sent = torch.zeros(2, 40, dtype=torch.float64), []
    replica = DistributedDataParallel(model, find_unused_parameters=True, **options)
    if late is None:
        compression = distributed.compress(replica, codec, timeout_s=100)
    else:
        distributed.delay(replica, late, timeout_s=100)
    optimizer = torch.optim.SGD(replica.parameters(), lr=RATE)
    data = torch.randn(14, ranks, 3, 40, dtype=torch.float64, generator=torch.Generator())
    apart = 0.0
    for step, xs in enumerate(data):
        optimizer.zero_grad(set_to_none=to_none)
        *first, last = uses(step, rank)
        for which in first:
            with replica.no_sync():
                replica(xs[rank], which).sum().backward()
        replica(xs[rank], last).sum().backward()
        optimizer.step()
        counts = [
            [sum(part.count(n) for part in uses(step, r)) for n in range(2)] for r in range(ranks)
        ]
        gradients = torch.tensor(counts, dtype=torch.float64)[..., None] * xs.sum(1)[:, None]
        sent.append(gradients.mean(0))
        if late is not None and step >= late:
            waiting += sent.pop(0)
        for n in range(2):
            if not any(row[n] for row in counts):
                continue
            if late is not None:
                weights[n] -= RATE * waiting[n]
                waiting[n] = 0
                continue
            for r in range(ranks):
                left[r, n] += gradients[r, n]
                message = codec.decode(codec.encode(left[r, n]), left[r, n])
                left[r, n] -= message
                weights[n] -= RATE * message / ranks
        pairs = zip(weights, model.layers, strict=True)
        apart = max(apart, *(float((a - b.weight).abs().max()) for a, b in pairs))
    if late is None:
        kept = compression.state_dict()["left"]
        pairs = ((left[rank, n], kept[f"layers.{n}.weight"]) for n in range(2))
        apart = max(apart, *(float((a - b).abs().max()) for a, b in pairs))
    return {"apart": apart, "replicated": training.is_replicated(model)}


class TwoDtypes(nn.Module):
    """A network in float64 whose last layer is in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = network(), nn.Linear(5, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.first(images).float())


def resumed(folder: Path, rank: int, codec: str) -> dict[str, Any]:
    """Six steps at once, and three and three with a new process's state in between."""

    def train(replica: DistributedDataParallel, first: int, last: int) -> None:
        optimizer = torch.optim.SGD(replica.parameters(), lr=RATE)
        for step in range(first, last):
            update(replica, optimizer, step, rank)

    model = network().float()
    models = [copy.deepcopy(model).to(memory_format=torch.channels_last) for _ in range(2)]
    whole = DistributedDataParallel(models[0])
    distributed.compress(whole, CODECS[codec], timeout_s=100)
    train(whole, 0, 6)
    half = DistributedDataParallel(models[1])
    compression = distributed.compress(half, CODECS[codec], timeout_s=100)
    train(half, 0, 3)
    file = folder / f"state-{rank}"
    torch.save([half.module.state_dict(), compression.state_dict()], file)
    # Saved weights keep their layout; a new model first has its own.
    again = copy.deepcopy(model).to(memory_format=torch.channels_last)
    weights, state = torch.load(file, weights_only=True)
    again.load_state_dict(weights)
    rest = DistributedDataParallel(again, bucket_cap_mb=0.001)
    resumed = distributed.compress(rest, CODECS[codec], timeout_s=100)
    resumed.load_state_dict(state)
    train(rest, 3, 6)
    sentence = ""
    if rank == 0:
        try:
            resumed.load_state_dict(state | {"place": state["place"].replace("rank 0", "rank 1")})
        except distributed.compression.ConfigError as error:
            sentence = str(error)
    pairs = zip(whole.module.parameters(), again.parameters(), strict=True)
    return {
        "equal": all(torch.equal(a, b) for a, b in pairs),
        "left": sum(float(one.abs().sum()) for one in state["left"].values()),
        "sentence": sentence,
    }


def overflowed(folder: Path, rank: int, codec: str) -> dict[str, Any]:
    """A scaled loss: its scale grows, one rank overflows, and the weights do not notice."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    model = network().float()
    pair = [DistributedDataParallel(copy.deepcopy(model)) for _ in range(2)]
    compressions = [
        distributed.compress(one, CODECS[codec], used, timeout_s=100)
        for one, used in zip(pair, (scaler, None), strict=True)
    ]
    scaled, plain = pair
    optimizers = [torch.optim.SGD(one.parameters(), lr=RATE) for one in pair]
    scales = []
    for step in range(8):
        images, labels = batch(step, rank)
        images = images.float()
        for optimizer in optimizers:
            optimizer.zero_grad()
        is_bad = step == 5
        loss = scaler.scale(cross_entropy(scaled(images), labels))
        (loss * float("inf") if is_bad and rank == 1 else loss).backward()
        scaler.step(optimizers[0])
        scaler.update()
        scales.append(scaler.get_scale())
        if not is_bad:  # the step that the scaler skips
            cross_entropy(plain(images), labels).backward()
            optimizers[1].step()
    states = [one.state_dict()["left"] for one in compressions]
    pairs = zip(*(one.module.parameters() for one in pair), strict=True)
    return {
        "equal": all(torch.equal(a, b) for a, b in pairs),
        "left": all(torch.equal(one, states[1][name]) for name, one in states[0].items()),
        "finite": all(bool(one.isfinite().all()) for one in states[0].values()),
        "scales": scales,
    }


def halves(folder: Path, rank: int) -> dict[str, Any]:
    """A model in bfloat16 keeps what it did not send in float32."""
    replica = DistributedDataParallel(nn.Linear(64, 64).bfloat16())
    compression = distributed.compress(replica, CODECS["top-k"], timeout_s=100)
    replica(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    left = compression.state_dict()["left"].values()
    return {"dtypes": [str(one.dtype) for one in left]}


def halved(folder: Path, rank: int) -> dict[str, Any]:
    """Gradients of both ranks are rounded, and their sum is."""
    model = network().float()
    replica = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.002)
    compression = distributed.compress(replica, distributed.Half(), timeout_s=100)
    batches = [batch(0, one) for one in range(2)]
    is_equal = True
    for _ in range(2):
        replica.zero_grad()
        cross_entropy(replica(batches[rank][0].float()), batches[rank][1]).backward()
        sums = [torch.zeros_like(one) for one in model.parameters()]
        for images, labels in batches:
            model.zero_grad()
            cross_entropy(model(images.float()), labels).backward()
            for total, one in zip(sums, model.parameters(), strict=True):
                total.copy_(total.bfloat16() + one.grad.bfloat16())
        pairs = zip(sums, replica.parameters(), strict=True)
        is_equal = is_equal and all(torch.equal(a / 2, b.grad) for a, b in pairs)
    return {
        "equal": is_equal,
        "replicated": training.is_replicated(replica.module),
        "sent": compression.sent_bytes,
        "whole": 2 * sum(one.nbytes for one in model.parameters()),
    }


def differing(folder: Path, rank: int) -> dict[str, Any]:
    """Ranks ask for different densities."""
    replica = DistributedDataParallel(nn.Linear(64, 64))
    distributed.compress(replica, distributed.TopK(0.1 + 0.1 * rank), timeout_s=100)
    return {}


def advised(folder: Path, rank: int, model: str) -> dict[str, Any]:
    """Advice in all ranks; and buckets by a list, beside those that it says DDP will make."""
    from ucudnn.distributed.exchange_advice import capped

    chosen = training.network()
    images, _ = training.data(BATCH)
    wrapped = DistributedDataParallel(chosen) if model == "wrapped" else chosen
    before = copy.deepcopy(chosen.state_dict())
    advice = distributed.advise(wrapped, images, timeout_s=100)
    caps = [size / (1 << 20) for size in (300, 1200, 2000)]
    replica = DistributedDataParallel(chosen, bucket_cap_mb_list=caps)
    sizes = training.count_buckets(replica)
    for _ in range(2):
        sizes.clear()
        replica(images).sum().backward()
    counts = capped(advice.profile.sizes, caps)
    ends = [sum(counts[:n]) for n in range(len(counts) + 1)]
    cuts = [slice(*pair) for pair in pairwise(ends)]
    after = chosen.state_dict()
    names = [name for name, _ in chosen.named_parameters()]
    return {
        "document": advice.to_dict(),
        "sentences": advice.sentences(),
        "predicted buckets": [sum(advice.profile.sizes[cut]) // 4 for cut in cuts],
        "buckets": sizes,
        "untouched": all(torch.equal(before[name], after[name]) for name in names),
    }


def advised_badly(folder: Path, rank: int) -> dict[str, Any]:
    """The inputs of one rank do not fit the model."""
    images = torch.ones(BATCH, 3 + rank, 9, 9)
    distributed.advise(training.network(), images, timeout_s=100)
    return {}


def elastic(folder: Path, rank: int, period: int, is_last: bool = False) -> dict[str, Any]:
    """Elastic averaging beside the same by numbers alone, with a restart in the middle."""
    ranks, alpha, beta = dist.get_world_size(), 0.3, 0.8
    models = [training.network(dtype=torch.float64) for _ in range(ranks)]
    centre = {
        n: one.clone() for n, one in models[0].state_dict().items() if one.is_floating_point()
    }
    own = copy.deepcopy(models[0])
    if is_last and rank == 1:
        own.to(memory_format=torch.channels_last)
    averager = distributed.ElasticAverager(own, period, alpha, beta, timeout_s=100)
    optimizer = torch.optim.SGD(own.parameters(), lr=RATE)
    for step in range(7):
        if step == 3:
            state = copy.deepcopy(averager.state_dict())
            averager = distributed.ElasticAverager(own, period, alpha, beta, timeout_s=100)
            averager.load_state_dict(state)
        update(own, optimizer, step, rank)
        averager.step()
        for r, one in enumerate(models):
            update(one, torch.optim.SGD(one.parameters(), lr=RATE), step, r)
        if (step + 1) % period == 0:
            for name, middle in centre.items():
                every = [one.state_dict()[name] for one in models]
                mean = sum(every) / ranks
                for one in every:
                    one.sub_(alpha * (one - middle))
                middle.add_(beta * (mean - middle))
    apart = max(float((averager.centre[n] - one).abs().max()) for n, one in centre.items())
    weights = training.difference(own, models[rank])
    averager.finish()
    return {
        "centre": apart,
        "weights": weights,
        "replicated": training.is_replicated(own),
        "finished": all(torch.equal(own.state_dict()[n], averager.centre[n]) for n in centre),
    }


def delayed(folder: Path, rank: int, late: int, dtypes: int = 1, **options: Any) -> dict[str, Any]:
    """Gradients that are late beside those of one process that knows the data of all."""
    ranks = dist.get_world_size()
    model = network() if dtypes == 1 else TwoDtypes()
    expected, waiting = copy.deepcopy(model), []
    replica = DistributedDataParallel(model, bucket_cap_mb=0.002, **options)
    distributed.delay(replica, late, timeout_s=100)
    optimizer = torch.optim.SGD(replica.parameters(), lr=RATE)
    for step in range(8):
        update(replica, optimizer, step, rank)
        expected.zero_grad()
        for r in range(ranks):
            images, labels = batch(step, r)
            (cross_entropy(expected(images), labels) / ranks).backward()
        waiting.append([one.grad.clone() for one in expected.parameters()])
        if len(waiting) > late:
            with torch.no_grad():
                for parameter, old in zip(expected.parameters(), waiting.pop(0), strict=True):
                    parameter.sub_(RATE * old)
    return {
        "weights": training.difference(replica.module, expected),
        "replicated": training.is_replicated(replica.module),
    }


def local_sgd(folder: Path, rank: int) -> dict[str, Any]:
    """Converted layers under torch's averager, beside torch's own layers."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = training.network(norm=False)
    pair = [training.planned(model), copy.deepcopy(model)]
    for one in pair:
        averager = PeriodicModelAverager(period=2)
        optimizer = torch.optim.SGD(one.parameters(), lr=RATE)
        for step in range(4):
            update(one, optimizer, step, rank)
            averager.average_parameters(one.parameters())
    return {"weights": training.difference(*pair)}
