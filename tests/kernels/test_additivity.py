"""benchmarks/additivity.py holds the chunks of a plan against its whole call."""

from __future__ import annotations

import pytest

from ucudnn.axis import BatchAxis, RowAxis
from ucudnn.config import Config
from ucudnn.kernels.tune import tune_problems
from ucudnn.plan import Chunk, Split
from ucudnn.problem import Problem

MS = 1_000_000


@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("extra_ms", [0, 3])
def test_what_a_call_takes_beside_its_chunks_is_seen(op, extra_ms, scripted, script, monkeypatch):
    module = script("additivity")
    backend = scripted(torch_default=lambda size: (size * MS, size << 20))
    problem = Problem(op, 12, 4, 4, (9, 9), (3, 3))
    (kernel,) = tune_problems([("layer", problem)], Config(workspace_limit="4MiB")).kernels
    assert kernel.split(12).chunks == (Chunk(4, "torch_default"),) * 3

    class Dearer(module.WholeLoop):
        def prepare(self, times):
            run = super().prepare(times)

            def dearer():
                backend.clock += extra_ms * MS * times
                run()

            return dearer

    monkeypatch.setattr(module, "WholeLoop", Dearer)
    found = module.additivity(backend, kernel, rounds=3)
    assert found.predicted == pytest.approx([12 / (12 + extra_ms)] * 3)
    assert found.same == pytest.approx([1.0] * 3)
    assert found.time_ns == (12 + extra_ms) * MS
    assert found.is_near == (extra_ms == 0)


@pytest.mark.parametrize(
    ("op", "roles"),
    [("fprop", {"later": 3}), ("dgrad", {"later": 3}), ("wgrad", {"alone": 1, "later": 2})],
)
def test_chunks_are_those_that_were_measured(op, roles, script):
    chunks = script("additivity").chunks
    whole = Problem(op, 2, 8, 8, (27, 9), (3, 3), (2, 1))
    by_rows = RowAxis(whole)
    for axis in (by_rows, BatchAxis(whole.with_batch(14))):
        listed = [Chunk(size, "gemm") for size in (4, axis.extent - 6, 2)]
        counts = chunks(axis, axis.split(listed))
        assert sum(arm.size * count for arm, count in counts.items()) == axis.extent
        found = {role: sum(n for arm, n in counts.items() if arm.role == role) for role in roles}
        assert found == roles
    undivided = Split("batch", (Chunk(14, "gemm"),))
    ((arm, count),) = chunks(BatchAxis(whole.with_batch(14)), undivided).items()
    assert (arm, count) == ((14, "gemm", "alone"), 1)
