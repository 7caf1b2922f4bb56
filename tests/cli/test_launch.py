"""`ucudnn launch`: what it hands on, and what it refuses; tests/distributed start real ranks."""

from __future__ import annotations

import os

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from ucudnn.distributed import counting, launching
from ucudnn.distributed.launching import Launch
from ucudnn.errors import RankError


@pytest.fixture
def launched(monkeypatch):
    """Scripts and settings that would have been launched."""
    calls = []
    monkeypatch.setattr(
        launching, "launch", lambda script, settings, _: calls.append((script, settings))
    )
    return calls


def test_options_and_the_script_with_its_own_are_told_apart(ucudnn, launched):
    words = ["--ranks-per-gpu", "2", "--device-workspace", "1GiB", "--mps", "off"]
    words += ["--torchrun", "--max-restarts=2 --nnodes=2"]
    for separator in (["--"], []):
        done = ucudnn("launch", *words, *separator, "train.py", "--mps", "mine", "-x")
        assert done.status == 0, done.err
        script, settings = launched.pop()
        assert script == ["train.py", "--mps", "mine", "-x"]
        options = ("--max-restarts=2", "--nnodes=2")
        assert settings == Launch(2, "off", device_workspace=1 << 30, torchrun_options=options)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks-per-gpu", "many"], "--ranks-per-gpu must be a number or auto, got 'many'"),
        (["--ranks-per-gpu", "0"], "must be above 0, got 0"),
        (["--mps", "perhaps"], "mps must be one of auto, require, off, got 'perhaps'"),
        (["--mps-percent", "0"], "mps_percent must be from 1 to 100, got 0"),
        (["--mps-percent", "101"], "mps_percent must be from 1 to 100, got 101"),
        (["--device-workspace", "much"], "--device-workspace"),
        (["--ranks-per-gpu", "auto", "--trial-rounds", "0"], "at least one round"),
        (["--ranks-per-gpu", "auto", "--torchrun", "--nnodes=2"], "found on one host"),
    ],
)
def test_what_is_not_allowed_is_refused_in_a_sentence(ucudnn, launched, words, sentence):
    done = ucudnn("launch", *words, "--", "train.py")
    assert done.status == 2
    assert sentence in done.err
    assert not launched


def test_auto_launches_what_was_found(ucudnn, launched, monkeypatch):
    monkeypatch.setattr(counting, "find_ranks", lambda *_: 4)
    done = ucudnn("launch", "--ranks-per-gpu", "auto", "--", "train.py")
    assert done.status == 0, done.err
    assert "--ranks-per-gpu 4 is used" in done.out
    assert launched == [(["train.py"], Launch(4))]


@pytest.mark.parametrize(
    ("error", "status"), [(RankError("rank 1 ended"), 1), (SignalException("got it", 15), 143)]
)
def test_how_ranks_end_is_the_exit_status(ucudnn, monkeypatch, error, status):
    def launch(*_: object) -> None:
        raise error

    monkeypatch.setattr(launching, "launch", launch)
    assert ucudnn("launch", "--", "train.py").status == status


def test_ranks_follow_the_plan_of_the_environment(ucudnn, monkeypatch):
    seen = []
    monkeypatch.setenv("UCUDNN_PLAN", "net.plan.json")
    monkeypatch.setattr(launching, "launch", lambda *_: seen.append(os.environ.get("UCUDNN_PLAN")))
    assert ucudnn("launch", "--", "train.py").status == 0
    assert seen == ["net.plan.json"]
