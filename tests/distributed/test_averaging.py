"""Elastic averaging and delayed gradients: equal to the same by numbers, without a message."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ucudnn.distributed import ElasticAverager, delay
from ucudnn.errors import ConfigError

ROUNDING = 1e-12


@pytest.mark.parametrize(("ranks", "period"), [(2, 1), (3, 2)])
def test_elastic_averaging_equals_its_formulas(launch, ranks, period):
    for one in launch("elastic", ranks, period=period).end():
        assert one["centre"] < ROUNDING
        assert one["weights"] < ROUNDING
        assert one["replicated"]
        assert one["finished"]


@pytest.mark.parametrize("late", [0, 1, 3])
def test_gradients_are_late_by_the_steps_that_are_asked_for(launch, late):
    for one in launch("delayed", 2, late=late).end():
        assert one["weights"] < ROUNDING
        assert one["replicated"]


def test_local_sgd_by_torch_with_converted_layers(launch):
    for one in launch("local_sgd", 2).end():
        assert one["weights"] < 2e-4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"period": 0}, "period must be an int of at least 1, got 0"),
        ({"alpha": 0}, "alpha must be above 0 and at most 1, got 0"),
        ({"alpha": 1.5}, "alpha must be above 0 and at most 1, got 1.5"),
        ({"beta": float("nan")}, "beta must be above 0 and at most 1, got nan"),
        ({"beta": None}, "beta must be above 0 and at most 1, got None"),
    ],
)
def test_elastic_averaging_refuses(alone, given, words):
    with pytest.raises(ConfigError, match=words):
        ElasticAverager(nn.Linear(2, 2), **given)


def test_both_refuse_models_that_are_wrapped_otherwise(alone):
    replica = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="pass the model that is not wrapped"):
        ElasticAverager(replica)
    with pytest.raises(ConfigError, match="wrapped in DistributedDataParallel, got Linear"):
        delay(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="steps must be an int of at least 0, got -1"):
        delay(replica, -1)
    delay(replica)
    with pytest.raises(ConfigError, match="has a communication hook already"):
        delay(replica)


def test_elastic_averaging_takes_a_job():
    with pytest.raises(ConfigError, match="takes a job of ranks; call distributed.init"):
        ElasticAverager(nn.Linear(2, 2))


def test_a_state_of_another_model_is_refused(alone):
    averager = ElasticAverager(nn.Linear(2, 2))
    state = averager.state_dict()
    for centre in ({}, state["centre"] | {"bias": torch.zeros(3)}):
        with pytest.raises(ConfigError, match="another model: names or shapes differ in .*bias"):
            averager.load_state_dict(state | {"centre": centre})
