"""Children forked while another thread of their parent tunes, installs or uses a cache."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager

import pytest
import torch
from laws import sample_measurements
from torch import nn

import ucudnn
from ucudnn.backends.cudnn.runtime import Runtime
from ucudnn.config import Config
from ucudnn.errors import UcudnnError
from ucudnn.problem import Problem
from ucudnn.system import processes
from ucudnn.tuning import tuner

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]


@contextmanager
def every_lock_held():
    """Another thread holds all locks of the package."""
    held, done = threading.Event(), threading.Event()

    def hold():
        with ExitStack() as stack:
            for lock in set(processes._locks):
                stack.enter_context(lock)
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_plan_is_installed_and_bound(plan_by_hand, in_child):
    model, x = nn.Conv2d(4, 6, 3), torch.randn(5, 4, 9, 8)
    plan = plan_by_hand(model, x)
    converted = nn.Sequential(nn.Conv2d(4, 6, 3))
    converted[0].load_state_dict(model.state_dict())
    ucudnn.convert_(converted, plan_by_hand(converted, x))
    y = model(x)

    def use():
        torch.testing.assert_close(converted(x), y)
        with ucudnn.installed(plan):
            torch.testing.assert_close(model(x), y)

    with ucudnn.installed(plan), every_lock_held():
        in_child(use)


def test_a_cache_is_read_and_written(tmp_path, in_child):
    first, second, third = sample_measurements(3)
    with ucudnn.cache.open(tmp_path) as cache:
        cache.put([first])

        def use():
            assert repr(cache.get(first.key)) == repr(first)
            cache.put([second])

        with every_lock_held():
            in_child(use)
        cache.refresh()
        assert repr(cache.get(second.key)) == repr(second)
        assert cache.get(third.key) is None


def test_tuning_begins(tmp_path, in_child):
    config = Config(backend="recorded", cache=str(tmp_path))

    def use():
        with pytest.raises(UcudnnError):  # nothing was recorded
            tuner.tune_problems([("", Problem("fprop", 1, 1, 1, (5,), (3,)))], config)

    with every_lock_held():
        in_child(use)


def test_cudnn_builds_a_plan(in_child, monkeypatch):
    runtime = Runtime(None)
    monkeypatch.setattr(Runtime, "_target", lambda *_: pytest.fail("a plan is built"))
    monkeypatch.setattr(torch.cuda, "device", lambda _: ExitStack())

    def use():
        with pytest.raises(pytest.fail.Exception, match="a plan is built"):
            runtime.configurations(0, Problem("fprop", 1, 1, 1, (5,), (3,)))

    with every_lock_held():
        in_child(use)
