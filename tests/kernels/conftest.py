"""A backend whose clock and memory the test writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakes import ScriptedBackend


@pytest.fixture
def scripted(monkeypatch) -> Callable[..., ScriptedBackend]:
    """Install a scripted backend as the one that tuning opens."""

    def install(**costs: Callable[[int], tuple[int | None, int]]) -> ScriptedBackend:
        backend = ScriptedBackend(costs)
        monkeypatch.setattr("ucudnn.kernels.tuner.open_backend", lambda _: backend)
        return backend

    return install
