"""The registry of backends agrees with what settings, devices and torch call them."""

from __future__ import annotations

import pytest
import torch

from ucudnn import config
from ucudnn.backends.registry import BACKENDS, backend_entry, entry_for_device, open_backend
from ucudnn.errors import ConfigError


def test_a_setting_names_every_backend() -> None:
    assert set(config.SETTINGS["backend"].choices) == {"auto", "recorded", *BACKENDS}


def test_an_entry_is_true_of_the_backend_that_it_opens() -> None:
    backend = open_backend("torch_cpu")
    entry = BACKENDS["torch_cpu"]
    assert (backend.name, backend.device().type) == (entry.name, entry.device_type)


@pytest.mark.parametrize("name", BACKENDS)
def test_an_entry_has_the_dispatch_key_that_torch_has_for_the_device(name: str) -> None:
    entry = backend_entry(name)
    assert entry_for_device(entry.device_type) is entry
    of_device = torch._C._dispatch_key_for_device(entry.device_type)
    assert entry.dispatch_key == of_device


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="backend must be one of auto, torch_cpu, cudnn, got 'x'"):
        open_backend("x")
