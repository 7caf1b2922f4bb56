"""Advice: the verdict on steps that are made up, and what a real step is said to do."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import ucudnn
from ucudnn.config import Config
from ucudnn.errors import ConfigError
from ucudnn.measurement import Device
from ucudnn.plan import Timing
from ucudnn.problem import Problem
from ucudnn.tuning.advice import Advice, KernelAdvice

MIB, MS = 1 << 20, 1_000_000


def timing(ms, workspace=0):
    return Timing(int(ms * MS), 0, int(workspace * MIB), 3)


def kernel(ms, workspace=0.0, last_ms=None, direct_ms=1.0, size=9, calls=1):
    return KernelAdvice(
        problem=Problem("fprop", 2, 2, 2, (size, size), (1, 1)),
        layers=("layer",) * calls,
        timing=timing(ms, workspace),
        channels_last=None if last_ms is None else timing(last_ms, workspace / 8),
        direct_ns=int(direct_ms * MS),
        least_ns=int(direct_ms * MS / 2),
    )


def advice(*kernels, step_ms=100, peak=1000, last_ratio=None):
    return Advice(
        kernels,
        Device("cpu", "made up"),
        step_ns=step_ms * MS,
        step_peak_bytes=peak * MIB,
        last_step_ns=step_ms * MS if last_ratio else 0,
        last_step_peak_bytes=peak * MIB if last_ratio else 0,
        last_ratio=last_ratio,
    )


def test_nothing_stands_out():
    found = advice(kernel(2, 1), kernel(3, 2), last_ratio=(1.0, 0.95, 1.05))
    assert found.verdict.startswith("leave it")
    assert not any(one.is_cliff() for one in found.kernels)


def test_a_cliff_that_costs_a_tenth_of_the_step():
    found = advice(kernel(2, 1), kernel(11, 1))
    assert [one.is_cliff() for one in found.kernels] == [False, True]
    assert found.verdict == (
        "tune it without a limit: 1 kernel is on a cliff, which costs up to 10% of the step."
    )
    # the same cliff in a step in which it hardly counts
    assert advice(kernel(2, 1), kernel(11, 1), step_ms=1000).verdict.startswith("leave it")


def test_a_cliff_that_another_layout_shows():
    found = advice(kernel(20, last_ms=8, direct_ms=5))
    assert found.kernels[0].is_cliff()
    assert not found.kernels[0].is_cliff(is_last=True)
    assert "up to 12% of the step" in found.verdict  # 20 ms that need be 8
    # no bound is known on a device whose speed nobody measured
    assert advice(kernel(20, last_ms=8, direct_ms=0)).kernels[0].is_cliff()


def test_channels_last_that_wins_beyond_the_noise():
    kernels = kernel(4, last_ms=3), kernel(3, last_ms=3)
    won = advice(*kernels, last_ratio=(0.8, 0.75, 0.85))
    assert won.verdict == "use channels_last, with which a step takes 0.80 times as long."
    assert advice(*kernels, last_ratio=(0.8, 0.5, 1.1)).verdict.startswith("leave it")


def test_cliffs_that_channels_last_leaves_or_makes():
    made = kernel(4, last_ms=60)
    found = advice(kernel(30, last_ms=4), made, last_ratio=(0.8, 0.75, 0.85))
    assert found.verdict.startswith("use channels_last")
    assert "then tune it so without a limit: 1 kernel is on a cliff" in found.verdict


def test_a_limit_that_few_kernels_exceed():
    found = advice(kernel(4, 400), *[kernel(4, 3.5, calls=4)] * 4, peak=1000)
    assert found.suggested_limit == 4 * MIB
    assert found.verdict == (
        "tune it with workspace_limit='4MiB', which touches few kernels and lowers workspace "
        "from 400 MiB."
    )
    # of a step that takes much more memory, and where the limit would have to be nearly as large
    assert advice(kernel(4, 400), *[kernel(4, 3.5, calls=4)] * 4, peak=9000).suggested_limit is None
    assert advice(kernel(4, 400), kernel(4, 390), peak=1000).suggested_limit is None


def test_kernels_that_were_not_timed_are_counted():
    late = KernelAdvice(kernel(1).problem, ("late",), None, None, 0, 0)
    found = Advice((kernel(3), late), Device("cpu", "made up"), reason="out of memory")
    assert "1 of 2 kernels were not timed." in found.sentences()
    assert "Not all steps were run: out of memory." in found.sentences()
    assert found.share(late.time_ns()) == 0
    assert json.loads(json.dumps(found.to_dict()))["kernels"][1]["timing"] is None


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Conv2d(8, 8, 3))


@pytest.mark.slow
def test_a_real_step_is_looked_at(model):
    x = torch.randn(4, 3, 12, 12, requires_grad=True)
    found = ucudnn.advise(model, x)
    assert {one.problem for one in found.kernels} == set(ucudnn.trace(model, x))
    assert all(one.timing and one.channels_last and one.direct_ns for one in found.kernels)
    assert found.step_ns > 0
    assert found.step_peak_bytes > 0
    assert found.last_ratio is not None
    assert found.reason == ""


def test_layouts_that_there_are_not(model):
    audio = ucudnn.advise(nn.Conv1d(2, 4, 3), torch.randn(2, 2, 9))
    last = {"memory_format": torch.channels_last}
    images = ucudnn.advise(model.to(**last), torch.randn(2, 3, 12, 12).to(**last))
    for found in (audio, images):
        assert found.last_ratio is None
        assert all(one.timing and one.channels_last is None for one in found.kernels)


def test_a_step_that_cannot_be_computed(model):
    x = torch.randn(4, 3, 12, 12)
    model.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("no step today")))
    traced = ucudnn.trace(nn.Sequential(*model), x)
    from ucudnn.tracing import Traced
    from ucudnn.tuning.advisor import advised

    found = advised(model, x, Traced([("layer", one) for one in traced]), Config())
    assert found.reason == "one could not be computed (no step today)"
    assert found.step_ns == 0
    assert all(one.timing for one in found.kernels)


def test_a_step_that_takes_too_long_is_run_once(model, monkeypatch):
    monkeypatch.setattr("ucudnn.tuning.advisor._LEAST_STEPS", float("inf"))
    found = ucudnn.advise(model, torch.randn(4, 3, 12, 12))
    assert found.step_ns > 0
    assert found.step_peak_bytes == 0  # which takes a second one
    assert found.last_ratio is None
    assert found.reason == "a step takes too long for more than one in a minute"
    assert all(one.timing for one in found.kernels)


def test_what_there_is_no_advice_on(model):
    with pytest.raises(ConfigError, match="no convolution to plan"):
        ucudnn.advise(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(ConfigError, match="recording"):
        ucudnn.advise(model, torch.ones(2, 3, 12, 12), Config(backend="recorded"))
