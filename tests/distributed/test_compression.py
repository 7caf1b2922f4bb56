"""Compressed gradients in DDP: equal to a simulation of all ranks, in whatever way DDP is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ucudnn.distributed import OneBit, TopK, compress
from ucudnn.errors import ConfigError

ROUNDING = 1e-12
# How DDP may hold the gradients of parameters that a step leaves out.
WAYS = [
    {},
    {"to_none": False, "bucket_cap_mb": 0.0001},
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": True, "to_none": False},
]


@pytest.mark.parametrize(
    ("codec", "ranks", "options"),
    [
        ("top-k", 2, {"bucket_cap_mb": 0.002}),
        ("top-k", 3, {"static_graph": True, "gradient_as_bucket_view": True}),
        ("top-k", 2, {"micro": 3, "bucket_cap_mb_list": [0.001, 0.003, 0.0005]}),
        ("one bit", 2, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.002}),
        ("one bit", 4, {}),
        ("ternary", 2, {"bucket_cap_mb": 0.001}),
    ],
    ids=str,
)
def test_compressed_training_equals_a_simulation_of_all_ranks(launch, codec, ranks, options):
    for one in launch("compressed", ranks, codec=codec, **options).end():
        assert one["weights"] < ROUNDING
        assert one["left"] < ROUNDING
        assert one["names"]
        assert one["replicated"]
        assert not one["dense"]
        # Of a parameter whose code is not smaller the message holds the numbers.
        assert one["sent"] == one["coded"] < one["whole"]


def test_density_one_is_plain_training(launch):
    for one in launch("compressed", 2, codec="all").end():
        assert one["dense"]
        assert one["weights"] < ROUNDING
        assert one["sent"] == one["whole"]


@pytest.mark.parametrize("codec", ["top-k", "one bit"])
def test_ranks_with_different_numbers_of_batches(launch, codec):
    for one in launch("joined", 2, codec=codec).end():
        assert one["weights"] < ROUNDING
        assert one["replicated"]


@pytest.mark.parametrize("codec", ["top-k", "all"])
def test_a_static_graph_with_parameters_of_two_dtypes(launch, codec):
    """In its first step DDP says of no bucket that it is the last one."""
    for one in launch("compressed", 2, codec=codec, dtypes=2, static_graph=True).end():
        assert one["weights"] < 1e-6
        assert one["left"] < 1e-6
        assert one["names"]
        assert one["replicated"]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_parameters_that_some_ranks_or_no_rank_use(launch, options):
    for one in launch("unused", 2, **options).end():
        assert one["apart"] < ROUNDING
        assert one["replicated"]


def test_buckets_that_ddp_leaves_out(alone):
    """DDP calls no hook for the last bucket, whose parameters are not used."""
    layers = nn.ModuleDict({"unused": nn.Linear(40, 40), "used": nn.Linear(40, 40)})
    layers.forward = layers["used"].forward
    replica = DistributedDataParallel(
        layers, find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=0.001
    )
    compress(replica, TopK(0.5))
    for _ in range(2):
        replica.zero_grad()
        replica(torch.ones(2, 40)).sum().backward()
        assert (layers["used"].weight.grad == 2).all()
        assert layers["unused"].weight.grad is None


@pytest.mark.parametrize("codec", ["top-k", "one bit", "ternary"])
def test_a_restart_equals_an_uninterrupted_run(launch, codec):
    first, *others = launch("resumed", 2, codec=codec).end()
    for one in (first, *others):
        assert one["equal"]
        assert (one["left"] > 0) == (codec != "ternary")
    assert "on rank 1 of 2, and this is" in first["sentence"]


@pytest.mark.parametrize("codec", ["top-k", "one bit", "ternary"])
def test_an_overflow_loses_nothing_and_scales_do_not_matter(launch, codec):
    for one in launch("overflowed", 2, codec=codec).end():
        assert one["scales"] == [4, 8, 8, 16, 16, 8, 8, 16]
        assert one["finite"]
        if codec != "ternary":  # whose random numbers are other ones after the skipped step
            assert one["equal"]
            assert one["left"]


def test_half_adds_gradients_up_in_bfloat16(launch):
    for one in launch("halved", 2).end():
        assert one["equal"]
        assert one["replicated"]
        assert one["sent"] == one["whole"] / 2


def test_halves_are_kept_in_single_precision(launch):
    for one in launch("halves", 2).end():
        assert set(one["dtypes"]) == {"torch.float32"}


def test_ranks_with_different_codecs_are_named(launch):
    for one in launch("differing", 2).end():
        assert one["error"] == "RankError"
        assert "codec is TopK(density=0.2) on rank 1, but TopK(density=0.1)" in one["sentence"]


def test_compress_refuses_what_it_cannot_compress(alone):
    with pytest.raises(ConfigError, match="wrapped in DistributedDataParallel, got Linear; FSDP2"):
        compress(nn.Linear(2, 2), OneBit())
    replica = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="codec must be Half, TopK, .* got 0.01"):
        compress(replica, 0.01)
    compress(replica, OneBit())
    with pytest.raises(ConfigError, match="has a communication hook already; make a new"):
        compress(replica, OneBit())
    table = DistributedDataParallel(nn.Sequential(nn.Embedding(3, 2, sparse=True)))
    with pytest.raises(ConfigError, match="those of 0 are sparse; use sparse=False"):
        compress(table, OneBit())
    waves = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ConfigError, match="those of weight are complex"):
        compress(DistributedDataParallel(waves), OneBit())


def test_a_state_of_another_model_is_refused(alone):
    compression = compress(DistributedDataParallel(nn.Linear(2, 2)), TopK(0.5))
    state = compression.state_dict()
    for left, words in (
        ({"bias": torch.zeros(3)}, r"bias has the shape \(3,\) there, and here \(2,\)"),
        ({"scale": torch.zeros(3)}, r"scale has the shape \(3,\) there, and here is none"),
    ):
        with pytest.raises(ConfigError, match=words):
            compression.load_state_dict(state | {"left": left})
    assert compression.state_dict() == state


def test_bytes_are_those_that_the_kernel_counts(package):
    """In a network namespace, where nothing else is sent."""
    if subprocess.run(["unshare", "-rn", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no network namespaces here")
    command = ["unshare", "-rn", sys.executable, str(Path(__file__).with_name("counted.py"))]
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    ended = subprocess.run(
        command, check=True, capture_output=True, env=environment, text=True, timeout=200
    )
    counted = json.loads(ended.stdout)
    # 20,000 numbers and places of a weight, 10 of a bias, in five steps.
    assert counted["ours"] == 5 * 8 * (20_000 + 10)
    # By both ranks; headers, acknowledgements and the barriers are more.
    assert 1 <= counted["kernel"] / (2 * counted["ours"]) < 1.05
