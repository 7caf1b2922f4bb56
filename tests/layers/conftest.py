"""Plans made by hand, so that tests of layers need no measuring."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from ucudnn.backends import open_backend
from ucudnn.config import Config
from ucudnn.execution.execute import Call
from ucudnn.plan import KernelPlan, Plan, Timing
from ucudnn.tracing import trace_layers

TIMING = Timing(time_ns=1, spread_ns=0, workspace_bytes=0, samples=1)


@pytest.fixture
def plan_by_hand() -> Callable[..., Plan]:
    """A plan that computes every batch in chunks of one size by one algorithm, where it can."""
    return _plan


def _plan(
    model: nn.Module,
    inputs: object,
    chunk: int = 2,
    algorithm: str = "im2col_gemm",
    config: Config | None = None,
) -> Plan:
    backend = open_backend("torch_cpu")
    kernels = {}
    for name, problem in trace_layers(model, inputs).layers:
        last = tuple((min(chunk, n), 0) for n in range(1, problem.batch + 1))
        # Some algorithms compute a whole batch and refuse a single sample of it.
        sizes = {min(chunk, n) for n in range(1, problem.batch + 1)}
        refusals = [backend.refusal(problem.with_batch(size), algorithm) for size in sizes]
        chosen = "torch_default" if any(refusals) else algorithm
        kernels[problem] = KernelPlan(
            problem=problem,
            layers=(name,),
            algorithms=(chosen,),
            alone=(-1,) * problem.batch,
            last=last,
            predicted_time_ns=1,
            timing=TIMING,
            default=TIMING,
        )
    return Plan(
        kernels=tuple(kernels.values()),
        device=backend.device(),
        software=backend.software(),
        conditions=backend.conditions(),
        config=config or Config(),
        backend="torch_cpu",
    )


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
