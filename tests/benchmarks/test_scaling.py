"""Predictions of benchmarks/scaling.py, where they are known without it."""

from __future__ import annotations

import json
import runpy
from dataclasses import asdict

import pytest

from ucudnn.distributed.exchange_advice import ExchangeAdvice, Profile, ways
from ucudnn.solvers import Line, Link

MS, MIB = 1_000_000, 1 << 20


@pytest.fixture(scope="module")
def scaling(repository):
    return runpy.run_path(str(repository / "benchmarks" / "scaling.py"))


PROFILE = Profile(
    1, (4 * MIB,) * 4, (25 * MS, 50 * MS, 75 * MS, 100 * MS), 100 * MS, Line(0, 0), Line(0, 0)
)


def test_the_slowest_of_many_ranks(scaling):
    assert scaling["slowest"](1, 0.05) == 1
    assert scaling["slowest"](64, 0.0) == 1
    # Expected maxima of lognormal times, by simulation.
    assert scaling["slowest"](64, 0.05) == pytest.approx(1.12, abs=0.01)
    assert scaling["slowest"](100_000, 0.05) == pytest.approx(1.24, abs=0.01)


def test_a_free_link_scales_perfectly(scaling):
    free = Link(0, 0)
    for ranks in (2, 64, 100_000):
        weak = scaling["predict"](PROFILE, free, ranks, False, 0.0)
        assert set(weak.values()) == {100 * MS}
        strong = scaling["predict"](PROFILE, free, ranks, True, 0.0)
        assert strong["ring"] == round(100 * MS / ranks)


def test_compression_is_dense_where_it_is_not_smaller(scaling):
    slow = Link(1000, 10)
    few = scaling["predict"](PROFILE, slow, 16, False, 0.0)
    assert few["top-k, 1 %"] < few["ring"]
    many = scaling["predict"](PROFILE, slow, 128, False, 0.0)
    assert many["top-k, 1 %"] == many["ring"]
    assert scaling["crossing"](0.01, 1_000_000, Link(0, 1)) == 100


def test_documents_are_read_again(scaling):
    advice = ExchangeAdvice(PROFILE, tuple(ways(PROFILE)))
    again = scaling["read"](json.loads(json.dumps(advice.to_dict())))
    assert asdict(again) == asdict(PROFILE)
