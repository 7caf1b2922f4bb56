"""From a list of convolutions to a plan: open the cache and the device, and tune."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from time import monotonic
from typing import cast

import torch

import ucudnn
from ucudnn import cache as cache_room
from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.backends.cudnn.offline import list_configurations
from ucudnn.backends.cudnn.profile import DeviceProfile
from ucudnn.backends.recorded import RecordedBackend
from ucudnn.backends.registry import backend_entry
from ucudnn.benchmark.protocol import PROTOCOL
from ucudnn.benchmark.worker import Worker
from ucudnn.cache import AbstractCache, MemoryCache
from ucudnn.cache.schema import read_entries
from ucudnn.config import Backend, Config, require_config
from ucudnn.errors import ConfigError, NoiseWarning, TuningInterruptedError, quoted, warn
from ucudnn.execution.validity import require_real
from ucudnn.kernels.deadline import Deadline
from ucudnn.kernels.limits import Limits
from ucudnn.kernels.noise import noise_of
from ucudnn.kernels.results import Report
from ucudnn.kernels.schedule import TuningScheduler
from ucudnn.measurement import Measurement, Subject
from ucudnn.outcomes import Origin
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.system.processes import ForkSafeLock

_log = logging.getLogger("ucudnn")
_BUSY = (
    "other processes use this machine: times will be too long and gains uncertain; end them, or "
    "tune again later, which takes anew what was measured meanwhile"
)
# Only one tuning runs at a time. Two would perturb each other's times, and workspace is measured by
# torch's profiler, of which a process has only one.
_measuring = ForkSafeLock()


def tune_problems(
    layers: Iterable[tuple[str, Problem]],
    config: Config | None = None,
    on_progress: Report | None = None,
    measurements: AbstractCache | None = None,
    backend: AbstractBackend | None = None,
    biased: Collection[Problem] = (),
    remeasure: bool = False,
    limits: Limits | None = None,
    deadline: Deadline | None = None,
    last: Deadline | None = None,
    worker: Worker | None = None,
) -> Plan:
    """Measure and plan the convolutions of a training step; equal ones are measured once.

    Problems that take a larger part of the step are measured more carefully.

    Args:
        layers: the name of a layer and its problem, once per call. All of them are planned;
            `config.ops` matters only for tracing.
        config: the settings; default: `Config()`.
        on_progress: called after every measurement.
        measurements: an open cache to use, which stays open; None: the cache of the config.
        backend: backend of the device; None: the one that the settings name.
        biased: problems to whose result a layer adds a bias, which is timed with them.
        remeasure: measure everything anew, even if it is in the cache.
        limits: workspace that each kernel may use; None: the limit of the settings.
        deadline: when measuring ends; it is exceeded by at most one measurement, but see `last`.
            None: by `config.time_budget_s`, or else by the default time budget of the effort.
        last: what must have a plan and has none goes on after the deadline until it has one, at
            most until this moment: kernels that exceed their limit, and smaller batches of kernels
            that have a limit. None: without end, or until the end of `config.time_budget_s` if the
            deadline is None, too. Kernels over what a memory budget leaves them have no end.
        worker: the worker to measure in if the backend needs one, which stays open; None: one for
            this call.

    Raises:
        ConfigError: there is no problem to plan.
        PlanError: a problem must have a plan, and none fits its workspace limit.
        BusyError: workspace must be measured, and torch's profiler is in use.
        TuningInterruptedError: on Ctrl-C, with the plan so far.
    """
    config, began = require_config(config), monotonic()
    if config.deterministic is None and torch.are_deterministic_algorithms_enabled():
        config = replace(config, deterministic=True)
    if limits is None:
        if config.memory_budget is not None:
            raise ConfigError(
                "memory_budget is of a model's step, and there is no model to run here; tune a "
                "model, or set workspace_limit instead"
            )
        limits = Limits(config.limit_bytes)
    if deadline is None and config.time_budget_s is not None:
        deadline = last = Deadline.within(config.time_budget_s)
    by_problem = layers_by_problem(layers, config)
    opened = _open_cache(config) if measurements is None else nullcontext(measurements)
    with _measuring, opened as cache:
        scheduler = TuningScheduler(
            backend or _open_backend(config, cache),
            cache,
            config,
            by_problem,
            limits,
            on_progress=on_progress,
            biased=biased,
            remeasure=remeasure,
            deadline=deadline,
            last=last,
            worker=worker,
        )
        return _run(scheduler, config, began)


def _run(scheduler: TuningScheduler, config: Config, began: float) -> Plan:
    """Measure and plan, with a warning where the machine is busy or the plan's times are noisy."""
    session = scheduler.session
    if session.is_busy:
        warn(_BUSY, NoiseWarning)
    try:
        scheduler.run()
    # A user who interrupts tuning gets the plan so far.
    except KeyboardInterrupt:
        raise TuningInterruptedError(_plan(scheduler, config, began)) from None
    plan = _plan(scheduler, config, began)
    _log.info("measured %d candidates, reused %d", session.measured, session.reused)
    noise = noise_of(plan)
    # A plan that comes wholly from the cache gives no second warning.
    if session.measured and noise.is_noisy:
        warn(
            f"the times of this plan are noisy: {noise}; tune again when the machine is quiet",
            NoiseWarning,
        )
    return plan


def layers_by_problem(
    layers: Iterable[tuple[str, Problem]], config: Config
) -> dict[Problem, tuple[str, ...]]:
    """The names of the layers of each distinct problem, in the order of the model.

    Raises ConfigError if there are none.
    """
    names: dict[Problem, list[str]] = {}
    for name, problem in layers:
        # The name of a layer that is called twice in a step is in the list twice, so that its time
        # counts twice.
        names.setdefault(problem, []).append(name)
    if not names:
        raise ConfigError(
            "there is no convolution to plan: the model computes none on these inputs "
            f"for ops={','.join(config.ops)}"
        )
    return {problem: tuple(found) for problem, found in names.items()}


def _plan(scheduler: TuningScheduler, config: Config, began: float) -> Plan:
    budget_s, results = scheduler.budget_s, scheduler.results
    require_real(results.kernels, scheduler.session.backend)
    plan = plan_without_kernels(scheduler.session.backend, config)
    assert plan.origin is not None
    origin = replace(
        plan.origin,
        budget="" if budget_s is None else f"{budget_s:g}",
        seconds=round(monotonic() - began),
        left_out=(*results.left_out, *map(str, results.too_large)),
        over_limit=tuple(map(str, results.over_limit)),
    )
    return replace(plan, kernels=results.kernels, origin=origin)


def plan_without_kernels(backend: AbstractBackend, config: Config) -> Plan:
    """A plan by these settings, made here and now, that leaves all convolutions to torch."""
    return Plan(
        kernels=(),
        origin=Origin(
            made=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            ucudnn=ucudnn.__version__,
            protocol=PROTOCOL,
            effort=config.effort,
            load=f"{os.getloadavg()[0]:.1f}",
        ),
        device=backend.device(),
        software=backend.software(),
        conditions=backend.conditions(),
        # A plan from a recording names the backend that can run it, not the one that replays it.
        config=replace(config, backend=cast(Backend, backend.name), device=None)
        if config.is_replayed
        else config,
        backend=backend.name,
    )


def device_type(config: Config) -> str:
    """The kind of device that a plan will be for: "cpu" or "cuda".

    >>> device_type(Config(backend="torch_cpu"))
    'cpu'
    """
    # For a recording, the kind of device is read from its measurements.
    if config.backend == "recorded":
        with _open_cache(config) as cache:
            return _open_backend(config, cache).device().type
    return backend_entry(config.backend).device_type


def _open_cache(config: Config) -> AbstractContextManager[AbstractCache]:
    if config.is_replayed:
        # A recording is only read. It may also be a file that was exported from a cache.
        return open_recording(config.cache)
    return cache_room.open(config.cache)


def _open_backend(config: Config, cache: AbstractCache) -> AbstractBackend:
    if config.backend == "recorded":
        return RecordedBackend(cache, config.device)
    if config.device is None:
        return open_backend(config.backend)
    # Here `device` is a device profile: a file that describes to cuDNN a GPU that is not in this
    # machine. Other backends cannot use such a file, so they are refused.
    if config.backend != "cudnn":
        raise ConfigError(
            f"device (={quoted(config.device)}) is what backend='recorded' replays, or a GPU's "
            f"profile for backend='cudnn', and backend is {config.backend!r}; set one of the two "
            f"or leave device out"
        )
    return _recorded_by_profile(cache, config.device)


def open_recording(path: str | None) -> AbstractCache:
    """Open measurements for replay: a cache's folder, or a file that `cache export` wrote.

    None: the user's cache.
    """
    # A cache is a folder. For a path that does not exist, `cache.open` raises the error.
    if path is None or not os.path.isfile(path):
        return cache_room.open(path, "r")
    cache = MemoryCache()
    cache.put_entries(read_entries(path))
    return cache


def _recorded_by_profile(cache: AbstractCache, path: str) -> RecordedBackend:
    """The recorded measurements of a profile's device that the installed cuDNN can use."""
    profile = DeviceProfile.load(path)
    of_device = [
        entry
        for entry in cache
        if entry.key.device.name == profile.name
        and entry.key.device.compute_capability == profile.compute_capability
    ]
    engines = filter(_is_engine, of_device)
    problems = list(dict.fromkeys(entry.key.problem for entry in engines))
    # An engine that was recorded with another version may not exist in the cuDNN that is installed
    # here, and a plan must not use it.
    listed = {
        (listing.problem, one.identity)
        for listing in list_configurations(problems, profile)
        for one in listing.configurations
    }
    return RecordedBackend(
        (
            entry
            for entry in of_device
            if not _is_engine(entry) or (entry.key.problem, entry.key.algorithm) in listed
        ),
        profile.name,
    )


def _is_engine(entry: Measurement) -> bool:
    """True for a chunk by an engine of cuDNN without bias, which cuDNN can list without a GPU."""
    # torch's own convolution is left out, because it exists with any version of cuDNN.
    is_candidate = entry.key.subject == Subject.CHUNK and not entry.key.is_default
    return is_candidate and not entry.adds_bias
