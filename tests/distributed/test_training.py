"""Converted layers in data-parallel training equal torch's, however it is wrapped and shared."""

from __future__ import annotations

import pytest

# Sums in another order, 20 steps of float32 with momentum: what torch differs by from itself.
FLOAT32 = 2e-4


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (4, {}),
        (2, {"last": True}),
        pytest.param(2, {}, marks=pytest.mark.process),
        (2, {"static_graph": True, "gradient_as_bucket_view": True}),
        (2, {"micro": 4}),
        (2, {"joined": True}),
    ],
)
def test_ddp_with_converted_layers_equals_ddp_with_torch_layers(launch, ranks, options):
    for one in launch("ddp", ranks, **options).end():
        assert one["loss"] < FLOAT32
        assert one["weights"] < FLOAT32
        assert one["learned"] < 0.9 or "joined" in options
        assert one["replicated"]
        ours, theirs = one["buckets"]
        assert ours == theirs
        # One for each update: the gradients of micro-steps are communicated once.
        assert len(ours) == (5 if "joined" in options else 20)


@pytest.mark.parametrize("last", [False, True], ids=["keep", "channels_last"])
def test_fully_sharded_parameters(launch, last):
    for one in launch("fsdp", 2, last=last).end():
        assert one["loss"] < FLOAT32
        assert one["weights"] < FLOAT32
        # forward and weight gradient of three layers, data gradient of two
        assert one["planned calls"] == 20 * 8


# Time per sample of each rank; in the second, ranks are only able to take even numbers.
FAST, SLOW = [10 * n for n in range(1, 13)], [30 * n for n in range(1, 13)]
EVEN = [None if n % 2 else 10 * n for n in range(1, 13)]


@pytest.mark.parametrize(
    ("times", "sizes"),
    [
        ([FAST], [12]),
        ([FAST, SLOW], [9, 3]),
        ([SLOW, EVEN], [2, 10]),
        ([FAST, SLOW, FAST, SLOW], [5, 1, 5, 1]),
    ],
)
def test_uneven_shares_give_the_gradient_of_the_whole_batch(launch, times, sizes):
    said = launch("uneven", len(times), times=times, batch=12).end()
    # The parts of the ranks follow each other, in whole batches and in smaller ones.
    for parts in zip(*(one["parts"] for one in said), strict=True):
        assert [first for first, _ in parts[1:]] == [last for _, last in parts[:-1]]
        assert (parts[0][0], parts[-1][1]) in ((0, 12), (0, 3))
    for one in said:
        assert sorted(one["sizes"]) == sorted(sizes)
        assert one["gradient"] < 1e-12
        assert one["weights"] < 1e-12
        assert one["replicated"]


def test_synchronized_batch_norm_leaves_our_layers_and_needs_a_gpu(launch):
    (one,) = launch("synchronized_batch_norm", 1).end()
    assert one["norm"] == "SyncBatchNorm"
    assert set(one["kinds"]) == {"ucudnn.nn"}
    assert "GPU" in one["sentence"]
    assert one["steps"] == "a SyncBatchNorm computes with all ranks"


@pytest.mark.parametrize(("ranks", "devices"), [(2, 1), (3, 1), (4, 2), (2, 2)])
def test_gradients_in_two_levels_are_those_of_ddp(launch, ranks, devices):
    for one in launch("two_levels", ranks, devices=devices).end():
        # The sums are in another order, but every replica has the same. Ranks that share no device
        # are reduced as always.
        assert one["weights"] < 1e-11
        assert one["replicated"]
        assert one["reduced"] == (ranks > devices)


@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp first"])
def test_segments_in_ranks_train_as_one_process_does(launch, how):
    for one in launch("segments", 2, how=how).end():
        assert one["weights"] < 1e-12
        # Each gradient was communicated once for each update, when all micro-batches had added up.
        assert one["buckets"] == (5 * one["values"] if how == "ddp" else 0)
