"""Shares of a batch: every sample in one share, shares as the solver has them, refusals."""

from __future__ import annotations

import pytest

from ucudnn.distributed import Shares, step_times
from ucudnn.errors import ConfigError


@pytest.mark.parametrize("sizes", [(1,), (6, 2), (5, 1, 5, 1), (1, 1, 1, 97), (3, 8, 2)])
def test_every_sample_of_every_batch_belongs_to_one_rank(sizes):
    seen = [Shares(sizes, index, 0) for index in range(len(sizes))]
    for total in range(1, sum(sizes) + 1):
        parts = [one.part(total) for one in seen]
        samples = [sample for part in parts for sample in range(total)[part]]
        assert samples == list(range(total))
        assert sum(one.weight(total) for one in seen) == pytest.approx(len(sizes))
        for part, size in zip(parts, sizes, strict=True):
            assert abs(part.stop - part.start - size * total / sum(sizes)) <= 1
    assert [one.part().stop - one.part().start for one in seen] == list(sizes)


def test_a_batch_larger_than_was_shared_out_is_refused():
    with pytest.raises(ConfigError, match="a global batch has 1 to 8 samples as shared out, got 9"):
        Shares((6, 2), 0, 0).part(9)


def test_steps_are_timed_at_the_sizes_asked_for():
    called = []
    times = step_times(called.append, [4, 2, 4])
    assert [time_ns is not None for time_ns in times] == [False, True, False, True]
    assert called == [2] * 6 + [4] * 6
    with pytest.raises(ConfigError, match="sizes must name batch sizes from 1 on"):
        step_times(called.append, [])


def test_ranks_share_by_their_times(launch):
    times = [[10 * n for n in range(1, 9)], [30 * n for n in range(1, 9)]]
    said = launch("share", 2, times=times, batch=8).end()
    assert [one["sizes"] for one in said] == [[6, 2]] * 2
    assert [one["index"] for one in said] == [0, 1]
    assert said[0]["time_ns"] == 60


def test_a_rank_that_would_get_nothing_is_named(launch):
    times = [[1, 2, 3], [100, 200, 300]]
    for one in launch("share", 2, times=times, batch=3).end():
        assert one["ranks"] == [1]
        assert "rank 1 would get no sample of a batch of 3" in one["sentence"]


def test_ranks_that_name_different_batches_are_refused(launch):
    for one in launch("share", 2, times=[[1]] * 2, batch=-2).end():
        assert one["ranks"] == [1]
        assert "it shares a batch of -1, where rank 0 shares -2" in one["sentence"]
