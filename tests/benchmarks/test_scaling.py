"""Predictions and collectives of benchmarks/scaling.py, where they are known without it."""

from __future__ import annotations

import json
import runpy
from dataclasses import asdict

import pytest
from messages import LINK, RANKS, Ranks, ring_by_messages

from ucudnn.distributed.exchange_advice import ExchangeAdvice, Profile, ways
from ucudnn.solvers import Curve, Link

MS, MIB = 1_000_000, 1 << 20


@pytest.fixture(scope="module")
def scaling(repository):
    return runpy.run_path(str(repository / "benchmarks" / "scaling.py"))


PROFILE = Profile(
    1,
    (4 * MIB,) * 4,
    (25 * MS, 50 * MS, 75 * MS, 100 * MS),
    100 * MS,
    Curve.line(0, 0),
    Curve.line(0, 0),
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


def tree_by_messages(all_ranks: Ranks, members: list[int], size: float) -> None:
    """Up a binomial tree to the first member; back down are the same messages turned round."""
    rounds, step = [], 1
    while step < len(members):
        pairs = range(0, len(members) - step, 2 * step)
        rounds.append([(members[n + step], members[n], size) for n in pairs])
        step *= 2
    for messages in rounds:
        all_ranks.send(messages)
    for messages in reversed(rounds):
        all_ranks.send([(target, source, size) for source, target, size in messages])


@pytest.mark.parametrize("ranks", RANKS)
def test_tree_equals_its_messages(scaling, ranks):
    all_ranks = Ranks(ranks, LINK)
    tree_by_messages(all_ranks, list(range(ranks)), 4000.0)
    assert scaling["tree"](ranks, 4000.0, LINK) == max(all_ranks.now)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_halving_equals_its_messages(scaling, ranks):
    all_ranks, size, distance = Ranks(ranks, LINK), 4096.0, ranks // 2
    exchanges = []
    while distance:
        size /= 2
        exchanges.append([(r, r ^ distance, size) for r in range(ranks)])
        distance //= 2
    for messages in [*exchanges, *reversed(exchanges)]:
        all_ranks.send(messages)
    assert scaling["halving"](ranks, 4096.0, LINK) == max(all_ranks.now)


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (3, 1), (2, 2), (4, 4)])
def test_two_level_equals_its_messages(scaling, nodes, per_node):
    inside, size = Link(10, 0.125), 4800.0
    node = Ranks(per_node, inside)
    tree_by_messages(node, list(range(per_node)), size)
    across = ring_by_messages(nodes, size / nodes, LINK, 2 * (nodes - 1))
    found = scaling["two_level"](nodes * per_node, size, LINK, per_node, inside)
    assert found == max(node.now) + across


@pytest.mark.parametrize(("ranks", "shards"), [(1, 1), (3, 1), (4, 2), (4, 4), (16, 8)])
def test_server_equals_its_messages(scaling, ranks, shards):
    all_ranks, size = Ranks(ranks + shards, LINK), 4000.0
    for turn in range(ranks):
        # In each turn the shards serve different ranks.
        pairs = [((turn + shard) % ranks, ranks + shard) for shard in range(shards)]
        all_ranks.send([(rank, shard, size / shards) for rank, shard in pairs])
    for turn in range(ranks):
        pairs = [((turn + shard) % ranks, ranks + shard) for shard in range(shards)]
        all_ranks.send([(shard, rank, size / shards) for rank, shard in pairs])
    assert scaling["server"](ranks, size, LINK, shards) == max(all_ranks.now)
