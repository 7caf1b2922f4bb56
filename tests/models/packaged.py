"""Networks of other packages, with random weights; a test whose package is missing is skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

# Settings of tiny transformers, and of those for speech.
NARROW: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
SPEECH: dict[str, Any] = {
    **NARROW,
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}


def transformers(name: str, **settings: Any) -> nn.Module:
    """A model of transformers."""
    library = pytest.importorskip("transformers", reason="the extra `test` brings transformers")
    made = getattr(library, name)
    return made(made.config_class(**settings))


def monai(name: str, **settings: Any) -> nn.Module:
    """A network of MONAI."""
    networks = pytest.importorskip("monai.networks.nets", reason="the extra `test` brings monai")
    return getattr(networks, name)(**settings)


class Network(NamedTuple):
    """How to make a network, whose class has this name, and the shape of its input."""

    library: Callable[..., nn.Module]
    name: str
    shape: tuple[int, ...]
    settings: dict[str, Any]

    def make(self) -> nn.Module:
        """The network; the same weights each time."""
        torch.manual_seed(0)
        return self.library(self.name, **self.settings)

    def input(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """A batch."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.shape, generator=generator, dtype=dtype)


def hugging_face(name: str, *shape: int, **settings: Any) -> Network:
    return Network(transformers, name, shape, settings)


def medical(name: str, *shape: int, **settings: Any) -> Network:
    return Network(monai, name, shape, settings)


def tensors_in(value: Any) -> list[Tensor]:
    """The differentiable tensors of an output, which may be a tuple or a mapping."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    values = value.values() if isinstance(value, dict) else value
    return [tensor for one in values if one is not None for tensor in tensors_in(one)]
