"""Plans made by hand, so that tests of layers need no measuring."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from by_hand import in_chunks, where_it_can
from torch import nn

from ucudnn.backends import open_backend
from ucudnn.config import Config
from ucudnn.execution.execute import Call
from ucudnn.plan import Plan
from ucudnn.steps.tracing import trace_layers


@pytest.fixture
def plan_by_hand() -> Callable[..., Plan]:
    """A plan that computes every batch in chunks of one size by one algorithm, where it can."""

    def plan(
        model: nn.Module,
        inputs: object,
        chunk: int = 2,
        algorithm: str = "im2col_gemm",
        config: Config | None = None,
    ) -> Plan:
        backend = open_backend("torch_cpu")
        algorithm_of = where_it_can(backend, algorithm, chunk)
        return in_chunks(backend, trace_layers(model, inputs).layers, chunk, algorithm_of, config)

    return plan


@pytest.fixture
def computed(monkeypatch):
    """The operations that plans computed so far."""
    seen = []
    run = Call.__call__

    def spy(self, *operands):
        seen.append(self.problem.op)
        return run(self, *operands)

    monkeypatch.setattr(Call, "__call__", spy)
    return seen
