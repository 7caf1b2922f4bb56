"""Times of a GPU: kernels are timed without the host that launches them, steps with it.

The GPU here is a clock: a kernel begins when the host has launched it and the last one has ended.
"""

from __future__ import annotations

import pytest
import torch

from ucudnn.backends.cudnn import backend
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.benchmark.protocol import AbstractLoop, Protocol, Sampler


class Gpu:
    """Time of the host and of the device, in ns."""

    def __init__(self, cycles_per_ns):
        self.host = self.device = 0
        self.waits = 0
        self._cycles_per_ns = cycles_per_ns

    def launch(self, kernel_ns, host_ns):
        self.host += host_ns
        self.device = max(self.device, self.host) + kernel_ns

    def sleep(self, cycles):
        self.waits += 1
        self.launch(int(cycles / self._cycles_per_ns), 0)

    def synchronize(self):
        self.host = max(self.host, self.device)


class Kernels(AbstractLoop):
    """Runs of some kernels each; `waits` if a run waits for the device."""

    def __init__(self, gpu, kernel_ns, host_ns, count=1, waits=False):
        self._gpu = gpu
        self._kernel = kernel_ns, host_ns
        self._count = count
        self._waits = waits

    def prepare(self, times):
        def run():
            for _ in range(times * self._count):
                self._gpu.launch(*self._kernel)
                if self._waits:
                    self._gpu.synchronize()

        return run


@pytest.fixture(params=[1.98, 0.6], ids=["fast clock", "slow clock"])
def gpu(request, monkeypatch):
    found = Gpu(request.param)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = max(found.host, found.device)

        def synchronize(self):
            found.host = max(found.host, self.at)

        def elapsed_time(self, other):
            return (other.at - self.at) / 1e6

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", found.sleep, raising=False)
    monkeypatch.setattr(backend, "perf_counter_ns", lambda: found.host)
    return found


@pytest.fixture
def cudnn():
    return object.__new__(CudnnBackend)  # its constructor asks for a GPU


@pytest.mark.parametrize("count", [1, 32], ids=["one kernel", "32 kernels"])
@pytest.mark.parametrize("host_ns", [8_000, 30_000])
@pytest.mark.parametrize("kernel_ns", [3_000, 20_000, 100_000])
def test_a_kernel_is_timed_without_the_host(gpu, cudnn, kernel_ns, host_ns, count):
    sampler = Sampler(Kernels(gpu, kernel_ns, host_ns, count), cudnn)
    sampler.warm_up(Protocol())
    for _ in range(3):
        assert sampler.sample_ns() == pytest.approx(kernel_ns * count, rel=1e-3)


def test_where_the_host_gets_ahead_by_itself_the_wait_is_short(gpu, cudnn):
    sampler = Sampler(Kernels(gpu, 100_000, 30_000), cudnn)
    sampler.warm_up(Protocol())
    began = gpu.device
    times = [sampler.sample_ns() for _ in range(20)]
    assert gpu.device - began < 1.25 * 40 * sum(times)  # a sample has 40 runs


def test_a_step_is_timed_with_the_host(gpu, cudnn):
    step = Kernels(gpu, 3_000, 30_000, 100).prepare(1)
    assert cudnn.elapsed_ns(step) == 100 * 30_000 + 3_000


def test_a_run_that_waits_for_the_device_itself_is_timed_as_it_is(gpu, cudnn):
    """And what it waits for beforehand does not grow from one sample to the next."""
    sampler = Sampler(Kernels(gpu, 100_000, 30_000, 8, waits=True), cudnn)
    sampler.warm_up(Protocol())
    began, waited = gpu.host, gpu.waits
    for _ in range(20):
        # The first kernel is launched while the device is kept busy.
        assert sampler.sample_ns() == pytest.approx(8 * 130_000, rel=0.05)
    assert gpu.waits == waited + 20
    # a sample of 4 ms, and a wait of 10 ms by the fast clock or 33 ms by the slow one
    assert gpu.host - began < 20 * (4_200_000 + 34_000_000)
