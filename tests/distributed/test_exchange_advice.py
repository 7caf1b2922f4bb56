"""Advice on exchanging gradients: from scripted times with a known answer, and in real ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ucudnn import distributed
from ucudnn.distributed.exchange_advice import (
    HARM,
    Coded,
    ExchangeAdvice,
    ExchangeWay,
    Profile,
    capped,
    parse_link,
    ways,
)
from ucudnn.errors import ConfigError
from ucudnn.solvers import Contention, Curve, Link

MS, MIB = 1_000_000, 1 << 20
FREE = Curve((0,), (0,))
TOP_K = Coded("top-k", "compress(TopK)", 3, 0.02, 4 * MS, 2 * MS)
HALF = Coded("half", "compress(Half)", 2, 0.5, 1 * MS, 1 * MS, is_gathered=False)


def profile(reduce: Curve = FREE, gather: Curve = FREE, **given: object) -> Profile:
    """Four gradients of 4 MiB, the last ready at the end of a step of 100 ms."""
    found = Profile(
        4, (4 * MIB,) * 4, (40 * MS, 60 * MS, 80 * MS, 100 * MS), 100 * MS, reduce, gather
    )
    return replace(found, **given)


def advice(given: Profile) -> ExchangeAdvice:
    return ExchangeAdvice(given, tuple(ways(given)))


def measured(given: ExchangeAdvice, **times_ms: int) -> ExchangeAdvice:
    """With steps measured; `own` is torch's, others are named by the first word."""
    times = {name: time * MS for name, time in times_ms.items()}
    first = replace(given.ways[0], measured_ns=times.get("own", 0))
    rest = [replace(way, measured_ns=times.get(way.name.split()[0], 0)) for way in given.ways[1:]]
    return replace(given, ways=(first, *rest))


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("30us,1.25GB/s", Link(30_000, 0.8)),
        ("5ms, 200Mbit/s", Link(5e6, 40)),
        ("0 ns,1B/s", Link(0, 1e9)),
        ("0.5s,10Gbit/s", Link(5e8, 0.8)),
        ("1us,2kB/s", Link(1000, 5e5)),
    ],
)
def test_links_are_read_as_people_write_them(text, link):
    assert parse_link(text) == link


@pytest.mark.parametrize(
    "text",
    ["10", "", "30us", "30us,0GB/s", "1.2.3us,1GB/s", "-1us,1GB/s", "30us;1GB/s", "1m,1GB/s"],
)
def test_what_is_no_link_is_refused(text):
    with pytest.raises(ConfigError, match=r"a link is LATENCY,RATE such as 30us,1.25GB/s, got "):
        parse_link(text)


@pytest.mark.parametrize("caps", [[1, 25], [0.5], [0.001, 0.01, 0.1], [3, 1, 2], [100]])
def test_buckets_are_those_of_torch(caps):
    chance = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 300_000, (40,), generator=chance).tolist()
    limits = [int(cap * MIB) for cap in caps]
    parameters = [torch.empty(count) for count in counts]
    expected, _ = dist._compute_bucket_assignment_by_size(parameters, limits)
    assert capped([4 * count for count in counts], caps) == [len(one) for one in expected]


def test_step_without_a_wait_takes_what_it_computes():
    assert profile().step_ns([4]) == 100 * MS
    # The link has time for the first three while backward goes on, and the last takes its own.
    assert profile(Curve.line(0, MS / MIB)).step_ns([1, 1, 1, 1]) == 104 * MS
    assert profile(Curve.line(0, MS / MIB)).step_ns([4]) == 116 * MS
    assert profile(Curve.line(10 * MS, 0)).step_ns([3, 1]) == 110 * MS
    # 30 ms each from 40 ms on: the link is never free again.
    assert profile(Curve.line(30 * MS, 0)).step_ns([1, 1, 1, 1]) == 160 * MS


def test_exchanges_and_computing_slow_each_other_down():
    slow = profile(Curve.line(30 * MS, 0), contention=Contention(1.5, 1.25, 1.5))
    # The last 20 ms of computing take 25 ms, in which the first exchange does 16.7 of its 30 ms.
    # Beside the second one it takes 20 ms for the rest, in which that one does 13.3 of its 30 ms.
    assert slow.step_ns([3, 1]) == pytest.approx((80 + 25 + 20 + 30 - 40 / 3) * MS)
    assert "computing takes 1.25 times as long meanwhile" in advice(slow).sentences()[1]


def test_an_exchange_that_outlasts_computing_meets_slower_ranks():
    late = profile(Curve.line(30 * MS, 0), after_ns=2 * MS)
    assert late.step_ns([4]) == 132 * MS
    # An exchange that takes no time ends with computing.
    assert replace(late, reduce=FREE).step_ns([4]) == 100 * MS


def test_a_profile_is_fitted_to_times_that_were_measured_with_steps():
    given = profile(Curve.line(10 * MS, MS / MIB))
    assert given.bucket_bytes([3, 1]) == [12 * MIB, 4 * MIB]
    # Computing takes half, an exchange twice the time: (10 + 4) * 2 ms for the last bucket.
    fitted = given.fitted([3, 1], 50 * MS, 72 * MS, 125 * MS)
    assert fitted.compute_ns == 50 * MS
    assert fitted.reduce.time_ns(12 * MIB) == 44 * MS
    assert fitted.step_ns([3, 1]) == (40 + 44 + 28 + 3) * MS
    assert [way.name for way in ways(fitted, [1.0])] == [way.name for way in ways(given, [1.0])]


def test_encoding_delays_backward_and_decoding_comes_after_it():
    gather = Curve.line(0, 50 * MS / MIB)
    # 4 ms of encoding, 2 ms of decoding; messages of 0.08 MiB take 4 ms each.
    assert profile(gather=gather).step_ns([1, 1, 1, 1], TOP_K) == pytest.approx(
        (100 + 4 + 4 + 0.5) * MS, abs=100
    )
    assert profile(gather=gather).step_ns([4], TOP_K) == pytest.approx(
        (100 + 4 + 16 + 2) * MS, abs=100
    )
    assert profile().step_ns([1, 1, 1, 1], TOP_K) == 106 * MS


def test_a_job_that_does_not_wait_is_left_as_it_is():
    found = advice(profile(Curve.line(0.1 * MS, 0.0), coded=(HALF, TOP_K)))
    assert found.worth_measuring() == []
    assert found.chosen is found.ways[0]
    assert found.verdict.startswith("leave it as it is")
    assert found.bucket_cap_mb_list is None


def test_buckets_are_advised_where_they_are_enough():
    # Torch makes one bucket of all gradients but the first, and sends it at the end.
    given = profile(Curve.line(0, 3 * MS / MIB), coded=(HALF, TOP_K))
    found = advice(given)
    assert found.ways[0].predicted_ns == given.step_ns([1, 3]) == 136 * MS
    assert found.chosen is found.ways[1]
    assert found.chosen.predicted_ns == 112 * MS
    assert found.bucket_cap_mb_list == [8, 4, 4]
    assert found.verdict == (
        "3 buckets, with which a step is predicted to be 1.21 times as fast; the gradients stay "
        "the same: DistributedDataParallel(model, bucket_cap_mb_list=[8.0, 4.0, 4.0])"
    )


def test_harm_needs_a_gain_over_what_is_less_harmful():
    slow = profile(
        Curve.line(MS, 20 * MS / MIB), gather=Curve.line(MS, 20 * MS / MIB), coded=(HALF, TOP_K)
    )
    found = advice(slow)
    assert [way.harm for way in found.worth_measuring()] == [2, 3]
    names = [way.name for way in found.ways]
    assert names[0] == "as torch does it"
    # Measured: top-k is no faster than halves, and buckets no faster than torch's.
    buckets = found.ways[1].name.split()[0]
    times = {"own": 420, buckets: 415, "half": 250, "top-k": 245}
    told = measured(found, **times)
    assert told.chosen.name == "half"
    assert "1.68 times as fast; gradients are rounded: compress(Half)" in told.verdict
    told = measured(found, **(times | {"top-k": 120}))
    assert told.chosen.name == "top-k"
    assert "compare the accuracy" in told.verdict


def test_gains_below_the_error_of_the_model_are_not_told():
    found = advice(profile(Curve.line(0, 3 * MS / MIB), gather=FREE, coded=(TOP_K,)))
    own = found.ways[0].predicted_ns
    named = ways_by_name(found)["top-k"]
    assert 0.1 < found.gain(named, found.ways[0]) < 0.4
    # The model is wrong by 30 %, so no prediction of less than 60 % is told.
    wrong = measured(found, own=round(own * 1.3 / MS))
    assert wrong.error == pytest.approx(1 - 1 / 1.3, abs=0.01)
    assert wrong.chosen is wrong.ways[0]
    # It is told what was measured.
    known = measured(found, own=round(own * 1.3 / MS), **{"top-k": 107})
    assert known.chosen.name == "top-k"


def ways_by_name(found: ExchangeAdvice) -> dict[str, ExchangeWay]:
    return {way.name: way for way in found.ways}


def test_only_measured_ways_of_a_harm_count_where_one_was_measured():
    one = ExchangeWay("one", 3, 50, 0, "one")
    other = ExchangeWay("other", 3, 40, 0, "other", measured_ns=99)
    own = ExchangeWay("own", 0, 100, 0, measured_ns=100)
    assert ExchangeAdvice(profile(), (own, one, other)).chosen is own


def test_another_training_is_told_of_and_not_advised():
    waiting, free = advice(profile(Curve.line(1000 * MS, 0))), advice(profile())
    assert waiting.chosen.harm < 4
    assert waiting.other_training.name == "average parameters every 8 steps"
    told = [one for one in waiting.sentences() if one.startswith("Another training, average")]
    assert told[0].endswith("without DistributedDataParallel.")
    assert free.other_training is None
    assert not [one for one in free.sentences() if one.startswith("Another training")]


def test_gains_within_the_noise_are_not_told():
    own = ExchangeWay("own", 0, 100, 0, measured_ns=100)
    for noise, is_told in ((0.05, True), (0.2, False)):
        other = ExchangeWay("other", 1, 80, 0, "other", measured_ns=90, noise=noise)
        assert (ExchangeAdvice(profile(), (own, other)).chosen is other) == is_told


def test_a_plan_gains_less_where_steps_wait():
    def sentence(reduce: Curve) -> str:
        return next(s for s in advice(profile(reduce)).sentences() if s.startswith("A plan"))

    assert sentence(FREE).endswith("makes this step 1.20 times as fast.")
    assert sentence(Curve.line(1000 * MS, 0)).endswith("makes this step 1.00 times as fast.")


def test_bytes_and_ratios_of_the_ways():
    given = profile(coded=(HALF, TOP_K))
    found = ways_by_name(advice(given))
    assert found["as torch does it"].sent_bytes == 2 * 3 * 16 * MIB // 4
    assert found["half"].sent_bytes == 3 * 16 * MIB // 4
    assert found["top-k"].sent_bytes == 3 * round(0.02 * 16 * MIB)
    assert found["average parameters every 8 steps"].sent_bytes == 3 * MIB


def test_one_cap_where_torch_has_no_list():
    given = profile(Curve.line(5 * MS, 2 * MS / MIB), can_cut=False)
    way = ways(given)[1]
    assert way.code == f"DistributedDataParallel(model, bucket_cap_mb={way.caps_mb[0]})"
    every = [given.step_ns(capped(given.sizes, [2.0**n])) for n in range(-8, 8)]
    assert way.predicted_ns == min(every)


def test_advice_is_json_and_says_what_is_predicted():
    found = advice(profile(Curve.line(MS, 20 * MS / MIB), coded=(HALF,)))
    document = json.loads(json.dumps(found.to_dict()))
    assert document["chosen"]["harm"] == 2
    assert document["verdict"] == found.verdict
    first, line, model, _, _, verdict = found.sentences()
    assert "would take" in first
    assert "(predicted)" in first
    assert line == (
        "Gradients have 16 MiB. An all-reduce takes 1.08 ms for 4 KiB and 321 ms for 16 MiB."
    )
    assert model.startswith("Nothing was sent")
    assert verdict == f"Verdict: {found.verdict}"
    assert "predicted to be" in verdict
    assert [row[1] for row in found.rows()] == [HARM[way.harm] for way in found.ways]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "one rank exchanges nothing; start several ranks, or give ranks and link"),
        ({"ranks": 4}, "give both or neither"),
        ({"link": "30us,1GB/s"}, "give both or neither"),
        ({"ranks": 4, "link": "10"}, "a link is LATENCY,RATE"),
        ({"ranks": 0, "link": "30us,1GB/s"}, "ranks must be an int of at least 2, got 0"),
    ],
)
def test_advise_refuses(given, words):
    with pytest.raises(ConfigError, match=words):
        distributed.advise(nn.Linear(2, 2), torch.ones(1, 2), **given)


def test_advise_for_a_job_that_is_not_here():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 49, 2000))
    before = [one.clone() for one in model.parameters()]
    slow = distributed.advise(model, torch.ones(2, 3, 9, 9), ranks=8, link="1ms,1MB/s")
    assert slow.profile.ranks == 8
    assert slow.profile.reduce == Curve.line(14e6, 1750.0)
    assert slow.chosen.harm > 1
    assert all(way.measured_ns == 0 for way in slow.ways)
    # Many ranks gather more than a ring adds up.
    many = distributed.advise(model, torch.ones(2, 3, 9, 9), ranks=1000, link="1ms,1MB/s")
    assert not any(one.is_gathered for one in many.profile.coded)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(one.grad is None for one in model.parameters())


@pytest.mark.parametrize("model", ["network", "wrapped"])
def test_advise_in_ranks_gives_all_the_same(launch, model):
    first, second = launch("advised", 2, model=model).end()
    assert first["document"] == second["document"]
    for one in (first, second):
        assert one["untouched"]
        assert one["predicted buckets"] == one["buckets"]
    document = first["document"]
    assert document["profile"]["ranks"] == 2
    assert document["ways"][0]["measured_ns"] > 0
    assert document["profile"]["contention"]["computing"] >= 1
    assert "On 2 ranks a step takes" in first["sentences"][0]


def test_a_rank_that_cannot_compute_ends_all(launch):
    for one in launch("advised_badly", 2).end():
        assert one["error"] == "RankError"
        assert one["ranks"] == [1]
