"""Sharded tuning: all ranks at once, each measures a part of the kernels, all end with one plan.

The unit of work is a group of kernels that can share measurements. Ranks claim these items one by
one from the job's store, the most expensive first, and publish the measurements of each when it is
finished. There is no collective while they measure, so a rank that has less to do, fails or ends
blocks no other. At the end every rank has all measurements and decides by itself, like one process
with a full cache. Equal measurements lead to equal decisions. Then all ranks compare their plans.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import PrefixStore

from ucudnn.backends import open_backend
from ucudnn.config import Config
from ucudnn.distributed.affinity import CpuSet, assign_cpus, bound_to, cores, host_name
from ucudnn.distributed.agreement import (
    job_facts,
    kind_facts,
    require_equal_teams,
    require_one_plan,
)
from ucudnn.distributed.idle import idling
from ucudnn.distributed.journal import Journal
from ucudnn.distributed.measurement_sync import packed, sync_measurements, unpacked
from ucudnn.distributed.recording import RecordingCache, Records, SealedCache
from ucudnn.distributed.rendezvous import Group, Rendezvous
from ucudnn.distributed.work_queue import Heartbeat, TurnLock, WorkQueue
from ucudnn.errors import ConfigError, PlanError, UnsupportedError, UntunedWarning, warn
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.tuning import tuner
from ucudnn.tuning.progress import Progress

if TYPE_CHECKING:
    from torch import nn

_log = logging.getLogger("ucudnn")
Layers = list[tuple[str, Problem]]
Report = Callable[[Progress], None] | None


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts of waiting for other ranks.

    Args:
        timeout_s: how long to wait for a rank at a rendezvous or an exchange.
        lease_s: after this time without a heartbeat, other ranks take over a rank's work.

    Raises:
        ConfigError: a timeout is not above 0.
    """

    timeout_s: float = 300.0
    lease_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("timeout_s", "lease_s"):
            # Written so that it refuses nan, which no comparison holds for.
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)!r}")


def tune(
    model: nn.Module,
    example_inputs: Any,
    config: Config | None = None,
    group: Group = None,
    on_progress: Report = None,
    timeouts: Timeouts | None = None,
) -> Plan:
    """Tune like `ucudnn.tune`, in all ranks of a job at once; each rank gets its device's plan.

    Call it on all ranks after `init_process_group` and before the model is wrapped. Ranks with
    devices of one kind share the work. Existing measurements, also those of a job that was killed,
    are reused.

    >>> import tempfile, torch
    >>> config = Config(policy="undivided", cache=tempfile.mkdtemp())
    >>> plan = tune(torch.nn.Conv2d(3, 8, 3), torch.empty(2, 3, 9, 9), config)  # this process alone
    >>> sorted(kernel.problem.op for kernel in plan.kernels)
    ['fprop', 'wgrad']

    Args:
        model: the same on all ranks.
        example_inputs: with the local batch of one rank.
        config: the same on all ranks; the cache may be a folder of each host or one of all. After
            `time_budget_s` no rank begins another kernel; those left over run torch's own
            convolution.
        group: the ranks that take part; None: all.
        on_progress: called after every measurement of this rank.
        timeouts: how long to wait for other ranks.

    Raises:
        RankError: ranks differ, or do not arrive; the message names them.
        ConfigError: the model does not accept the inputs or computes no convolution.
        PlanError: no plan of some kernel fits the workspace limit; all ranks raise it.
    """
    from ucudnn.execution.layout import memory_format_of
    from ucudnn.tracing import trace_layers

    config = config or Config()
    traced = trace_layers(model, example_inputs, config.ops)
    plan = tune_problems(traced.layers, config, group, on_progress, timeouts, traced.biased)
    return replace(plan, memory_format=memory_format_of(model))


def tune_problems(
    layers: Iterable[tuple[str, Problem]],
    config: Config | None = None,
    group: Group = None,
    on_progress: Report = None,
    timeouts: Timeouts | None = None,
    biased: Collection[Problem] = (),
) -> Plan:
    """Tune like `ucudnn.tuning.tuner.tune_problems`, in all ranks of a job at once.

    Args:
        layers: the name of a layer and its problem, once per call; the same on all ranks whose
            devices are of one kind.
        config: the same on all these ranks.
        group: the ranks that take part; None: all.
        on_progress: called after every measurement of this rank.
        timeouts: how long to wait for other ranks.
        biased: the problems to whose result a layer adds a bias; the same on all these ranks.

    Raises:
        RankError: ranks differ, or do not arrive; the message names them.
        ConfigError: there is no problem to plan.
        PlanError: no plan of some problem fits the workspace limit; all ranks raise it.
    """
    config, timeouts = config or Config(), timeouts or Timeouts()
    _require_shareable(config)
    listed = list(layers)
    if not listed:
        raise ConfigError("there is no convolution to plan: pass the layers of a model")
    with ExitStack() as stack:
        rendezvous = stack.enter_context(Rendezvous("tune", group, timeouts.timeout_s))
        team = _form_team(rendezvous, listed, config, biased)
        journal = stack.enter_context(Journal(rendezvous, config.cache))
        # Items of different teams have the same numbers, so each team has its own keys.
        store = PrefixStore(team.name, rendezvous.store)
        heartbeat = stack.enter_context(Heartbeat(store, rendezvous.rank, timeouts.lease_s))
        # Made before the exchange of measurements, which counts towards the time budget.
        work = _Work(listed, config, journal, on_progress, biased)
        backend = open_backend(config.backend)
        sync_measurements(rendezvous, team.ranks, journal, backend, work.keys, _work_group_key)
        # The most expensive item first: a long one that starts last would keep all others waiting.
        order = sorted(range(len(work.items)), key=lambda item: -_flops(work.items[item]))
        queue = WorkQueue(store, rendezvous.rank, order, heartbeat)
        cpus = team.cpu_set
        turn = TurnLock(store, str(cpus.ranks), cpus.ranks, rendezvous.rank, heartbeat)
        # Without CPUs of its own, as on a GPU, a rank measures wherever it runs.
        with bound_to(cpus.cpus) if cpus.cpus else nullcontext():
            idle = idling(backend, [problem for _, problem in listed], len(cpus.ranks) == 1)
            _measure_all(work, queue, turn, idle)
        # All ranks unpack the same results, so an error of one item ends all of them alike.
        results = [unpacked(queue.result(item)) for item in range(len(work.items))]
        plan, sealed = _decide(listed, config, dict(zip(work.keys, results, strict=True)), biased)
        # If the plans differ, the journals stay, and the next job starts with their measurements.
        require_one_plan(rendezvous, plan)
        journal.publish(sealed.entries(), team.ranks)
    _log.info("ranks %s agreed on plan %s", team.ranks, plan.hash)
    return plan


def _require_shareable(config: Config) -> None:
    """Refuse settings that ranks cannot follow if each measures only some kernels.

    Raises:
        ConfigError: there is one.
    """
    if config.total_bytes is not None:
        raise ConfigError(
            "total_workspace is one pool of all kernels, which ranks that measure a part of them "
            "cannot divide; tune in one process and load its plan, or set workspace_limit"
        )
    if config.memory_budget is not None:
        raise ConfigError(
            "memory_budget is of a whole step, which ranks that measure a part of its kernels do "
            "not take; tune in one process and load its plan, or set workspace_limit"
        )
    if config.layout != "keep":
        raise ConfigError(
            f"layout={config.layout!r} is decided by whole steps of a model, which ranks that "
            f"measure a part of its kernels do not take; tune in one process and load its plan, or "
            f"set layout='keep'"
        )


def _decide(
    layers: Layers, config: Config, results: Mapping[Problem, object], biased: Collection[Problem]
) -> tuple[Plan, SealedCache]:
    """The plan by all measurements, without kernels that the time did not suffice for."""
    records = {key: result for key, result in results.items() if isinstance(result, Records)}
    # An item whose result is None was not begun in time.
    tuned = [(name, problem) for name, problem in layers if _work_group_key(problem) in records]
    if len(tuned) < len(layers):
        warn(
            f"{len(layers) - len(tuned)} of {len(layers)} calls are not in the plan and run "
            f"torch's own convolution: time_budget_s={config.time_budget_s} was over; raise it, or "
            f"tune again and go on from what is in the cache",
            UntunedWarning,
        )
    sealed = SealedCache(records.values())
    # Deciding measures nothing; a budget would only let a slow rank decide otherwise.
    untimed = replace(config, time_budget_s=None)
    plan = tuner.tune_problems(tuned, untimed, None, sealed, biased=biased, is_whole_step=False)
    left_out = [layer for layer in layers if layer not in tuned]
    missing = dict.fromkeys(str(problem) for _, problem in left_out)
    if missing and plan.origin is not None:
        plan = replace(plan, origin=replace(plan.origin, left_out=tuple(missing)))
    return replace(plan, config=config), sealed


@dataclass(frozen=True, slots=True)
class _Team:
    """The ranks that share work: those with devices of one kind.

    Args:
        name: different for each kind.
        ranks: in ascending order.
        cpu_set: the CPUs on which this rank measures; empty: the system schedules it.
    """

    name: str
    ranks: tuple[int, ...]
    cpu_set: CpuSet


def _form_team(
    rendezvous: Rendezvous, layers: Layers, config: Config, biased: Collection[Problem]
) -> _Team:
    """Find the ranks with this kind of device, and check that their problems and settings agree.

    Raises:
        RankError: they do not agree.
    """
    backend = open_backend(config.backend)
    device, software = backend.device(), backend.software()
    conditions = asdict(backend.conditions())
    # Without the names of layers, which may differ as long as the same is computed.
    problems = {
        f"problem {number}": _text(one) + (", with a bias" if one in biased else "")
        for number, (_, one) in enumerate(layers)
    }
    sent = {
        "kind": str(asdict(device)),
        "job": job_facts(software),
        "team": {
            **kind_facts(device, software),
            **{name: str(value) for name, value in conditions.items()},
            **{name: str(value) for name, value in config.to_dict().items()},
            "number of problems": str(len(layers)),
            **problems,
        },
        "host": host_name(),
        "cores": cores() if device.type == "cpu" else [],
    }
    received = rendezvous.exchange("work", sent)
    require_equal_teams(received)
    # In the order of ranks, which all of them see alike, so that they number kinds alike.
    kinds = list(dict.fromkeys(one["kind"] for one in received.values()))
    team = {rank: one for rank, one in received.items() if one["kind"] == sent["kind"]}
    cpu_set = CpuSet((), (rendezvous.rank,))
    # Only on a CPU do ranks compete for the processors that they measure on.
    if device.type == "cpu":
        # Ranks of other hosts have processors of their own.
        here = {rank: one["cores"] for rank, one in team.items() if one["host"] == sent["host"]}
        cpu_set = assign_cpus(rendezvous.rank, here, backend.conditions().threads)
    return _Team(f"kind {kinds.index(str(sent['kind']))}", tuple(team), cpu_set)


def _text(problem: Problem) -> str:
    # `str(problem)` is for people, and leaves out the padding and the math.
    return ", ".join(f"{name}={value}" for name, value in problem.to_dict().items())


class _Work:
    """The kernels in items that share no measurements, and the tuning of one item on this rank.

    Args:
        layers: the whole list of the job.
        config: the settings.
        journal: where measurements go.
        on_progress: called after every measurement of this rank.
        biased: the problems to whose result a layer adds a bias.
    """

    def __init__(
        self,
        layers: Layers,
        config: Config,
        journal: Journal,
        on_progress: Report,
        biased: Collection[Problem],
    ) -> None:
        groups: dict[Problem, Layers] = {}
        for name, problem in layers:
            groups.setdefault(_work_group_key(problem), []).append((name, problem))
        self.keys, self.items = list(groups), list(groups.values())
        # The budget is that of the whole job, and is checked before an item begins: one that is cut
        # short would be decided from half of its measurements.
        self._config = replace(config, time_budget_s=None)
        budget = config.time_budget_s
        self._deadline = None if budget is None else time.monotonic() + budget
        self._journal, self._on_progress, self._biased = journal, on_progress, biased
        self._measured = self._reused = 0

    def tune(self, item: int, count_done: Callable[[], int]) -> bytes:
        """Measure one item: its records, None after the deadline, or an error for all ranks."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            return packed(None)
        recording = RecordingCache(self._journal.cache)
        report = self._report_of_job(count_done())
        try:
            tuner.tune_problems(
                self.items[item],
                self._config,
                report,
                recording,
                biased=self._biased,
                is_whole_step=False,
            )
        except (PlanError, UnsupportedError) as error:
            # These are properties of the problem: every rank would get the same error.
            return packed(error)
        return packed(recording.records())

    def _report_of_job(self, done: int) -> Report:
        """A callback that turns the progress of one item into that of the job on this rank."""
        if self._on_progress is None:
            return None
        report, measured, reused = self._on_progress, self._measured, self._reused

        def forward(event: Progress) -> None:
            # An event counts from the start of its item; the job's counts go on.
            self._measured, self._reused = measured + event.measured, reused + event.reused
            # The time left depends on how many items the other ranks take.
            report(
                replace(
                    event,
                    done=done,
                    total=len(self.items),
                    measured=self._measured,
                    reused=self._reused,
                    seconds_left=None,
                )
            )

        return forward


def _work_group_key(problem: Problem) -> Problem:
    """Key of a work group: equal for problems that can share measurements.

    Problems can share measurements if they differ only in the batch, or, because of slabs, in size
    and padding along the outermost axis.
    """
    # In place of any number of rows, the smallest that the dilated kernel fits.
    kernel = problem.dilation[0] * (problem.kernel_size[0] - 1) + 1
    return replace(
        problem.with_batch(1),
        input_size=(kernel, *problem.input_size[1:]),
        padding=((0, 0), *problem.padding[1:]),
    )


def _flops(item: Layers) -> int:
    # A set: a problem that several layers compute is measured once.
    return sum(problem.flops for problem in {problem for _, problem in item})


def _measure_all(work: _Work, queue: WorkQueue, turn: TurnLock, idle: Callable[[], None]) -> None:
    """Measure items until each of them has a result, from any rank."""
    everything = range(len(work.items))
    while not queue.are_done(everything):
        item = None
        if turn.is_held():
            item = queue.claim()
            if item is not None:
                queue.finish(item, work.tune(item, lambda: queue.count_done(everything)))
            # Also without an item, so that ranks which share the CPUs get to claim theirs.
            turn.release()
        if item is None:
            idle()
