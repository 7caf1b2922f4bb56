"""What a planned call takes beyond its kernel is measured once, kept, and charged to plans."""

from __future__ import annotations

import pytest
import torch

from ucudnn.backends.torch_cpu.backend import TorchCpuBackend
from ucudnn.cache import MemoryCache
from ucudnn.execution.autograd import Geometry, convolution
from ucudnn.tuning import overhead, session
from ucudnn.tuning.session import Session


def test_a_device_that_the_host_does_not_wait_for_pays_nothing(scripted):
    assert overhead.planned_call_ns(scripted(torch_default=lambda size: (size, 0))) == 0


def test_what_is_measured_goes_the_way_of_a_layer(monkeypatch):
    """Each pass of the tiny layer is computed by a call, and gives torch's numbers."""
    backend = TorchCpuBackend()
    calls = {
        op: overhead._undivided(backend, overhead.replace(overhead._PROBLEM, op=op))
        for op in ("fprop", "dgrad", "wgrad")
    }
    ran = []

    def computed(which):
        call = calls[which]

        class Spy:
            problem = call.problem

            def __call__(self, *operands):
                ran.append(which)
                return call(*operands)

        return Spy()

    runner = overhead._Runner({which: computed(which) for which in calls})
    x, w = torch.randn(2, 4, 6, 6, requires_grad=True), torch.randn(4, 4, 3, 3, requires_grad=True)
    geometry = Geometry((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    y = convolution(runner, x, w, None, geometry)
    dy = torch.randn(y.shape)
    ours = [y, *torch.autograd.grad(y, (x, w), dy)]
    plain = torch.conv2d(x, w)
    torch.testing.assert_close(ours, [plain, *torch.autograd.grad(plain, (x, w), dy)])
    assert sorted(ran) == ["dgrad", "fprop", "wgrad"]
    monkeypatch.setattr(overhead, "_ROUNDS", 1)
    overhead._measured.cache_clear()
    assert isinstance(overhead.planned_call_ns(backend), int)
    overhead._measured.cache_clear()


@pytest.mark.parametrize("first_ns", [0, 7_000])
def test_it_is_kept_with_the_measurements(monkeypatch, first_ns):
    found = iter([first_ns, 9_000])
    monkeypatch.setattr(session, "planned_call_ns", lambda _: next(found))
    cache = MemoryCache()
    told = []
    for _ in range(2):
        one = Session(TorchCpuBackend(), cache)
        told.append(one.planned_call_ns())
        one.close()
    # nothing that was seen is nothing to keep
    assert told == [first_ns, first_ns or 9_000]
