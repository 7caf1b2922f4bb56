"""Noise: others on the machine are noticed, what they disturbed is marked, and taken anew."""

from __future__ import annotations

import itertools
import time
import warnings

import by_hand
import pytest
from by_hand import plan_of

from ucudnn import cache as caches
from ucudnn.backends import DeviceState
from ucudnn.backends.torch_cpu.processor import LoadMeter
from ucudnn.config import Config
from ucudnn.errors import NoiseWarning
from ucudnn.kernels.noise import Noise, noise_of
from ucudnn.kernels.tune import tune_problems
from ucudnn.plan import Timing
from ucudnn.problem import Problem
from ucudnn.reports.text import plan_table

MS = 1_000_000
PROBLEM = Problem("fprop", 4, 2, 2, (5, 5), (3, 3))
REAL_OTHERS = LoadMeter.others  # which tests are not to hang on


def kernel(size, time_ms=10.0, spread_ms=0.0, samples=9, predicted_ms=10.0, is_perturbed=False):
    timing = Timing(int(time_ms * MS), int(spread_ms * MS), 0, samples)
    more = {"predicted_time_ns": int(predicted_ms * MS), "is_perturbed": is_perturbed}
    return by_hand.kernel(size, batch=1, timing=timing, default=timing, **more)


def test_each_sign_is_counted():
    plan = plan_of(
        kernel(5),
        kernel(6, spread_ms=2),
        kernel(7, predicted_ms=13),
        kernel(8, samples=1, spread_ms=0, predicted_ms=13),
        kernel(9, is_perturbed=True),
        kernel(10, samples=0),  # predicted from a recording
    )
    assert noise_of(plan) == Noise(kernels=5, perturbed=1, wide=1, mispredicted=1, single=1)
    assert noise_of(plan).is_noisy  # one of five was timed under load
    assert not noise_of(plan_of(*[kernel(size) for size in range(5, 10)])).is_noisy
    assert str(noise_of(plan_of(kernel(5, samples=1)))) == "of 1 kernels 1 run only once"


def test_one_run_is_no_certainty():
    table = plan_table(plan_of(kernel(5, samples=1)))
    cells = [cell for column in table.columns for cell in column.cells]
    assert "10.0 ms 1 run" in cells
    assert not any("±" in str(cell) for cell in cells)


@pytest.fixture
def counters(tmp_path):
    """A file of the kernel's counters, and a function that lets others use processors."""
    path, ticks = tmp_path / "stat", itertools.count(1000, 100)

    def advance():
        path.write_text(f"cpu  {next(ticks)} 0 0 5000 0 0 0 0 0 0\ncpu0 0\n")

    advance()
    return path, advance


def test_others_on_the_machine_are_told_from_ourselves(counters, monkeypatch):
    path, advance = counters
    monkeypatch.setattr(LoadMeter, "others", REAL_OTHERS)
    meter = LoadMeter(path)
    time.sleep(0.25)
    assert meter.others() == 0  # we slept, and nobody else did anything
    advance()  # a second of processor time
    began = time.monotonic()
    while time.monotonic() - began < 0.25:
        pass  # of which we used a part
    others = meter.others()
    assert 0 < others <= 1 / 0.25
    advance()
    monkeypatch.setattr("ucudnn.backends.torch_cpu.processor._LEAST_S", 60.0)
    assert meter.others() == others  # too soon to tell
    assert LoadMeter(path.parent / "nothing").others() == 0
    path.write_text("of another system\n")
    assert LoadMeter(path).others() == 0


def test_load_counts_where_it_takes_our_processors(counters, monkeypatch):
    meter = LoadMeter(counters[0])
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for threads, others, load in ((8, 0.1, 0.0), (8, 0.5, 0.5), (2, 5.0, 0.0)):
        monkeypatch.setattr("torch.get_num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(meter, "others", lambda others=others: others)
        assert meter.load() == load


@pytest.fixture
def backend(scripted):
    """Where others come and go: `state` is what the test says."""
    found = scripted(
        torch_default=lambda size: (size * 2 * MS, 0), quick=lambda size: (size * MS, 0)
    )
    found.load = 0.0
    found.state = lambda: DeviceState(found.load)
    return found


def tuned(backend, **options):
    """How many candidates are run, and the plan."""
    before = len(backend.runs)
    plan = tune_problems([("layer", PROBLEM)], Config(), **options)
    return len(backend.runs) - before, plan


def entries():
    with caches.open(Config().cache, "r") as cache:
        return [entry.measurement for entry in cache.entries() if entry.measurement.samples]


def test_what_was_taken_under_load_is_taken_anew_when_it_is_quiet(backend):
    backend.load = 1.0
    with pytest.warns(NoiseWarning) as said:
        _, plan = tuned(backend)
    assert "other processes use this machine" in str(said[0].message)
    assert "the times of this plan are noisy" in str(said[1].message)
    assert plan.kernels[0].is_perturbed
    assert "timed while others used the processors" in plan.kernels[0].remarks
    assert all(entry.is_perturbed for entry in entries())
    # while it is busy nothing better can be had
    with pytest.warns(NoiseWarning, match="other processes"):
        assert tuned(backend)[0] == 0
    backend.load = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoiseWarning)
        ran, plan = tuned(backend)
        assert ran > 0
        assert not plan.kernels[0].is_perturbed
        assert not any(entry.is_perturbed for entry in entries() if entry.status == "ok")
        assert tuned(backend)[0] == 0


@pytest.mark.filterwarnings("ignore::ucudnn.errors.NoiseWarning")
def test_a_recording_counts_as_it_is(backend):
    backend.load = 1.0
    _, plan = tuned(backend)
    replayed = tune_problems([("layer", PROBLEM)], Config(backend="recorded"))
    assert replayed.split(PROBLEM) == plan.split(PROBLEM)


def test_all_times_are_taken_anew_where_that_is_wanted(backend):
    tuned(backend)
    assert tuned(backend)[0] == 0
    backend.costs["torch_default"] = lambda size: (size * MS // 2, 0)  # an upgrade nobody noticed
    ran, plan = tuned(backend, remeasure=True)
    assert ran > 0
    assert plan.kernels[0].is_default
    assert tuned(backend)[1].kernels[0].is_default


@pytest.mark.filterwarnings("ignore::ucudnn.errors.NoiseWarning")
def test_what_was_taken_under_load_replaces_nothing(backend):
    tuned(backend)
    quiet = {entry.key: entry for entry in entries() if entry.status == "ok"}
    backend.load = 1.0
    assert tuned(backend, remeasure=True)[0] > 0
    found = {entry.key: entry for entry in entries()}
    assert all(found[key] == entry for key, entry in quiet.items())
