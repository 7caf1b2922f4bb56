"""Elastic averaging and delayed gradients: equal to the same by numbers, without a message."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ucudnn.distributed import ElasticAverager, delay
from ucudnn.errors import ConfigError

ROUNDING = 1e-12
# How DDP may hold the gradients of parameters that a step leaves out.
WAYS = [{}, {"gradient_as_bucket_view": True, "to_none": False, "bucket_cap_mb": 0.0001}]


def _assign(model: nn.Module) -> None:
    state = {name: one.clone() for name, one in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": nn.Module.train,
    "layout": lambda model: model.to(memory_format=torch.channels_last),
    "dtype": nn.Module.double,
    "assigned": _assign,
    "assigned, still shared": lambda model: model.load_state_dict(model.state_dict(), assign=True),
}


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


def test_late_gradients_of_a_static_graph_with_parameters_of_two_dtypes(launch):
    for one in launch("delayed", 2, late=1, dtypes=2, static_graph=True).end():
        assert one["weights"] < 1e-6
        assert one["replicated"]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("late", [0, 1, 2])
def test_late_gradients_wait_for_a_step_that_uses_their_parameter(launch, late, options):
    for one in launch("unused", 2, late=late, **options).end():
        assert one["apart"] < ROUNDING
        assert one["replicated"]


def test_gradients_that_are_not_zeroed_are_late_once(alone):
    """Of a step that does not use a parameter, DDP leaves the gradient as it is."""
    layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
    layers.forward = lambda x, which: sum(layers[n](x) for n in which)
    replica = DistributedDataParallel(layers, find_unused_parameters=True)
    delay(replica)
    found = []
    for value, which in ((5.0, [0, 1]), (7.0, [0, 1]), (1.0, [0]), (1.0, [0]), (2.0, [0, 1])):
        replica(torch.full((1, 1), value), which).sum().backward()
        found.append(layers[1].weight.grad.item())
    # The second step sends 0 + 7, and gets 5; the last one gets the 7 and sends 5 + 2.
    assert found == [0, 5, 5, 5, 7]


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


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_shared", [False, True])
def test_elastic_averaging_follows_the_model(alone, change, is_shared):
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3))
    if is_shared:
        model[2].weight = model[0].weight
    start = {name: one.clone() for name, one in model.state_dict().items()}
    averager = ElasticAverager(model, period=2, alpha=0.5, beta=0.25)
    averager.step()
    CHANGES[change](model)
    for one in (*model.parameters(), *model.buffers()):
        nn.init.ones_(one.data)
    averager.step()
    for name, one in model.state_dict().items():
        if one.is_floating_point():
            centre = averager.centre[name]
            assert centre.dtype == one.dtype
            torch.testing.assert_close(one, (start[name].to(one) + 1) / 2)
            torch.testing.assert_close(centre, start[name].to(one) * 0.75 + 0.25)
    averager.finish()
    for name, one in averager.centre.items():
        assert torch.equal(model.state_dict()[name], one)
    assert model[1].num_batches_tracked == 1


def test_a_centre_in_float64_stays_so_over_a_restart(alone):
    model = nn.Linear(2, 2)
    averager = ElasticAverager(model, period=1, beta=0.1)
    model.double()
    model.weight.data.fill_(1 / 3)
    averager.step()
    state = copy.deepcopy(averager.state_dict())
    early, late = nn.Linear(2, 2).double(), nn.Linear(2, 2)
    for one in (early, late):
        averager = ElasticAverager(one, period=1, beta=0.1)
        averager.load_state_dict(state)
        one.double()
        averager.finish()
        assert torch.equal(one.weight, state["centre"]["weight"])


def test_ranks_may_have_different_layouts(launch):
    for one in launch("elastic", 2, period=2, is_last=True).end():
        assert one["centre"] < ROUNDING
        assert one["weights"] < ROUNDING


def test_elastic_averaging_refuses_a_model_that_has_changed(alone):
    model = nn.Linear(2, 2)
    averager = ElasticAverager(model, period=1)
    state = averager.state_dict()
    model.weight = nn.Parameter(torch.zeros(3, 2))
    del model.bias
    for call in (
        averager.step,
        averager.finish,
        averager.state_dict,
        lambda: averager.load_state_dict(state),
    ):
        with pytest.raises(ConfigError, match=r"names or shapes differ in .*bias.*weight.*; make"):
            call()


def test_a_state_of_another_model_is_refused(alone):
    averager = ElasticAverager(nn.Linear(2, 2))
    state = averager.state_dict()
    for centre in ({}, state["centre"] | {"bias": torch.zeros(3)}):
        with pytest.raises(ConfigError, match="another model: names or shapes differ in .*bias"):
            averager.load_state_dict(state | {"centre": centre})
