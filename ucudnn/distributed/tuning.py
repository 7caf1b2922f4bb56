"""Tune in all ranks: each rank measures a part of the kernels, one decides on the plan for all.

Ranks with devices of one kind divide the kernels among themselves. Each rank measures its kernels
as `ucudnn.tune` would, into its cache, and sends the measurements to the first of these ranks.
This first rank calls `ucudnn.tune`, which finds all measurements in the cache, and sends the plan
to the others. If a rank dies, the job ends, and what was measured until then is in the cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from time import monotonic
from typing import Any

from torch import nn

from ucudnn import cache as caches
from ucudnn.backends import open_backend
from ucudnn.cache import Entry
from ucudnn.config import Config, require_config
from ucudnn.distributed.agreement import job_facts, kind_facts, raise_errors, require_equal_teams
from ucudnn.distributed.rendezvous import Group, Rendezvous
from ucudnn.errors import (
    ConfigError,
    PlanError,
    UcudnnError,
    UcudnnWarning,
    UnsupportedError,
    UntunedWarning,
)
from ucudnn.kernels.results import Report, warn_of_untuned
from ucudnn.kernels.tune import device_type, tune_problems
from ucudnn.measurement import Role
from ucudnn.outcomes import Origin
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.steps import tune as alone
from ucudnn.steps.judge import reason_against_race
from ucudnn.steps.tracing import Traced, trace_layers

# This part of a time budget is for measuring; the rest is for deciding and for the step race.
_MEASURING = 0.75


def tune(
    model: nn.Module,
    example_inputs: Any,
    config: Config | None = None,
    group: Group = None,
    on_progress: Report | None = None,
    timeout_s: float = 1800.0,
    *,
    real: bool = False,
) -> Plan:
    """Tune like `ucudnn.tune`, in all ranks of a job at once; each rank gets its device's plan.

    Call it on all ranks after `init_process_group` and before the model is wrapped. Ranks with
    devices of one kind divide the measurements among themselves. The first of these ranks decides
    on the plan, and judges the plan by whole steps of its model.

    >>> import tempfile, torch
    >>> config = Config(policy="undivided", cache=tempfile.mkdtemp())
    >>> plan = tune(torch.nn.Conv2d(3, 8, 3), torch.empty(2, 3, 9, 9), config)  # this process alone
    >>> sorted(kernel.problem.op for kernel in plan.kernels)
    ['fprop', 'wgrad']

    Args:
        model: the same on all ranks.
        example_inputs: as for `ucudnn.tune`, with the local batch of one rank.
        config: the same on all ranks; each host may have a cache folder, or all share one.
        group: the ranks that take part; None: all.
        on_progress: called after every measurement of this rank.
        timeout_s: seconds to wait for another rank, which may measure this much longer.
        real: as for `ucudnn.tune`.

    Raises:
        RankError: ranks differ, cannot measure or do not arrive; the message names these ranks.
        ConfigError: the model does not accept the inputs or computes no convolution.
        PlanError: no plan of some kernel fits the workspace limit; all ranks raise it.
    """
    config = require_config(config)
    traced = _traced(model, example_inputs, config, real)
    with Rendezvous("tune", group, timeout_s) as rendezvous:
        team = _team(rendezvous, traced, config)
        began, is_shared = monotonic(), len(team) > 1
        if is_shared:
            _share(rendezvous, team, traced, config, on_progress)
        decided: Plan | UcudnnError | None = None
        if rendezvous.rank == team[0]:
            tuned = partial(_decide, began) if is_shared else alone.tune
            try:
                decided = tuned(model, example_inputs, config, on_progress, real=real)
            except UcudnnError as error:
                decided = error
        received = rendezvous.exchange("plan", decided)
    # An error of one rank is raised on all ranks, even on those with other kinds of device.
    for one in received.values():
        if isinstance(one, UcudnnError):
            raise one
    plan: Plan = received[team[0]]
    if is_shared:
        warn_of_untuned(len(plan.left_out), config.time_budget_s)
    return plan


def _traced(model: nn.Module, inputs: Any, config: Config, real: bool) -> Traced:
    """The convolutions of a model, in every layout that tuning considers."""
    own = trace_layers(model, inputs, config.ops, real=real)
    if config.layout != "keep" and not reason_against_race(
        model, inputs, config, device_type(config)
    ):
        # If a model cannot be traced in channels_last, `ucudnn.tune` says why.
        with suppress(ConfigError):
            last = trace_layers(model, inputs, config.ops, real=real, memory_format="channels_last")
            return Traced(own.layers + last.layers, own.biased | last.biased)
    return own


def _team(rendezvous: Rendezvous, traced: Traced, config: Config) -> tuple[int, ...]:
    """The ranks with this kind of device, after a check that they are about to do the same work."""
    backend = open_backend(config.backend)
    device, software = backend.device(), backend.software()
    # Names of layers are not compared, because they may differ although the same is computed.
    # Problems are compared in full, because `str(problem)` leaves out the padding and the math.
    facts = {
        **asdict(backend.conditions()),
        **config.to_dict(),
        "number of problems": len(traced.layers),
        **{
            f"problem {number}": ", ".join(f"{name}={x}" for name, x in asdict(one).items())
            + (", with a bias" if one in traced.biased else "")
            for number, (_, one) in enumerate(traced.layers)
        },
    }
    sent = {
        "kind": str(asdict(device)),
        "job": job_facts(software),
        "team": kind_facts(device, software) | {name: str(fact) for name, fact in facts.items()},
    }
    received = rendezvous.exchange("work", sent)
    require_equal_teams(received)
    return tuple(rank for rank, one in received.items() if one["kind"] == sent["kind"])


def _share(
    rendezvous: Rendezvous,
    team: Sequence[int],
    traced: Traced,
    config: Config,
    on_progress: Report | None,
) -> None:
    """Measure this rank's kernels, and collect all measurements in the first rank's cache."""
    mine = set(_by_worth(traced.layers)[team.index(rendezvous.rank) :: len(team)])
    layers = [layer for layer in traced.layers if _geometry(layer[1]) in mine]
    budget_s = config.time_budget_s and _MEASURING * config.time_budget_s
    # A memory budget applies to whole steps, so measuring ignores it. The rank that decides on the
    # plan uses it to choose among what was measured.
    own = replace(config, memory_budget=None, time_budget_s=budget_s)
    error = None
    try:
        # Errors and warnings are suppressed here, because the rank that decides gets the same
        # errors, and warns of all kernels.
        with warnings.catch_warnings(), suppress(PlanError, UnsupportedError):
            warnings.simplefilter("ignore", UcudnnWarning)
            if layers:
                tune_problems(layers, own, on_progress, biased=traced.biased)
        rendezvous.send("measurements", _known(mine, config))
    except UcudnnError as caught:
        error = str(caught)
    raise_errors(rendezvous.exchange("errors", error))
    if rendezvous.rank == team[0]:
        with caches.open(config.cache) as cache:
            for rank in team[1:]:
                received: list[Entry] = rendezvous.receive("measurements", rank)
                # If ranks share one cache, the measurements are there already.
                cache.put_entries(e for e in received if cache.get(e.measurement.key) is None)


def _decide(
    began: float,
    model: nn.Module,
    inputs: Any,
    config: Config,
    on_progress: Report | None,
    real: bool,
) -> Plan:
    """The plan of `ucudnn.tune` within the time that is left."""
    left, budget_s = config, config.time_budget_s
    if budget_s is not None:
        # Deciding on a plan needs some time, even if measuring has used up the budget.
        least_s = (1 - _MEASURING) * budget_s
        left = replace(config, time_budget_s=max(least_s, budget_s - (monotonic() - began)))
    with warnings.catch_warnings():
        # `tune` of this module gives this warning on all ranks, with the budget that was set.
        warnings.filterwarnings(
            "ignore", ".* not in the plan, or not at every batch", UntunedWarning
        )
        plan = alone.tune(model, inputs, left, on_progress, real=real)
    # The plan states the budget that the user set, and the time of all of tuning.
    origin = replace(plan.origin or Origin(), seconds=round(monotonic() - began))
    if budget_s is not None:
        origin = replace(origin, budget=f"{budget_s:g}")
    return replace(plan, config=replace(plan.config, time_budget_s=budget_s), origin=origin)


def _by_worth(layers: Sequence[tuple[str, Problem]]) -> list[Problem]:
    """The geometries of kernels, those with most operations in a step first."""
    # Kernels are ordered by their number of operations, which is known before they have run, and is
    # equal on all ranks.
    worth: dict[Problem, int] = {}
    for _, problem in layers:
        geometry = _geometry(problem)
        worth[geometry] = worth.get(geometry, 0) + problem.flops
    return sorted(worth, key=lambda geometry: -worth[geometry])


def _geometry(problem: Problem) -> Problem:
    """The problem at batch 1 and few rows: the same for all batches and slabs of a kernel.

    Kernels that differ only in their batch or rows share measurements.
    """
    # The number of rows is replaced by the smallest one into which the dilated filter fits, so that
    # the slabs of a convolution have equal geometries.
    rows = problem.dilation[0] * (problem.kernel_size[0] - 1) + 1
    return replace(
        problem.with_batch(1),
        input_size=(rows, *problem.input_size[1:]),
        padding=((0, 0), *problem.padding[1:]),
    )


def _known(geometries: set[Problem], config: Config) -> list[Entry]:
    """The cache's entries for some kernels that equal device, software and conditions measured."""
    backend = open_backend(config.backend)
    here = (backend.device(), backend.software(), backend.conditions())
    with caches.open(config.cache, "r") as cache:
        keys = ((entry, entry.measurement.key) for entry in cache.entries())
        return [
            entry
            for entry, key in keys
            if _geometry(key.problem) in geometries
            and (key.device, key.software, replace(key.conditions, role=Role.ALONE)) == here
        ]
