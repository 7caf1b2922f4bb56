"""What the scripts of this folder share: a counter of memory, and a network.

They know nothing of ucudnn. Each trains for 30 steps, prints the loss of each step, and the peak
of three of them by torch's own count.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

STEPS, COUNTED, BATCH, IMAGE = 30, range(20, 23), 64, 32


def network() -> nn.Module:
    """A network in blocks; its samples do not depend on each other."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def data(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels of one batch."""
    chance = torch.Generator().manual_seed(seed)
    images = torch.randn(BATCH, 3, IMAGE, IMAGE, generator=chance)
    return images, torch.randint(10, (BATCH,), generator=chance)


class Meter:
    """Counts the memory of tensors in some steps; `step` is called when a step begins."""

    def __init__(self) -> None:
        self._number, self._peak = -1, 0
        self._profile: Any = None

    def step(self) -> None:
        """Another step begins."""
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            live = peak = self._before
            events = self._profile.profiler.kineto_results.events()
            for event in sorted(events, key=lambda one: one.start_ns()):
                live += event.nbytes() if event.name() == "[memory]" else 0
                peak = max(peak, live)
            self._peak, self._profile = max(self._peak, peak), None
        self._number += 1
        if self._number in COUNTED:
            self._before = _held()
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()

    def end(self) -> None:
        """Print the peak."""
        self.step()
        print("peak", self._peak, flush=True)


def _held() -> int:
    """Bytes of parameters, buffers, gradients, and of the state of optimisers."""
    gc.collect()
    known = [one for one in gc.get_objects() if issubclass(type(one), (nn.Module, Optimizer))]
    modules = [one for one in known if isinstance(one, nn.Module)]
    tensors = [one for module in modules for one in (*module.parameters(), *module.buffers())]
    tensors += [one.grad for one in tensors if one.grad is not None]
    tensors += [
        one
        for it in known
        if isinstance(it, Optimizer)
        for one in tree_leaves([*it.state.values()])
    ]
    storages = [_local(one).untyped_storage() for one in tensors if isinstance(one, torch.Tensor)]
    return sum({one._cdata: one.nbytes() for one in storages}.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    # A sharded tensor has its part on this rank.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
