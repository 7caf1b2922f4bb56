"""Tune in all ranks at once: each measures a part of the kernels, all end with one plan.

The unit of work is a kernel with everything that decides its plan. Ranks take kernels one by one
from the job's store, the costliest first, and publish the records of each when it is done; there is
nothing else to wait for, so a rank that has less to measure, fails or ends stops no other. At the
end every rank has all records and decides by itself, as one process with a full cache would: the
same records, the same decisions; then all compare their plans.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import PrefixStore

from ucudnn.backends import open_backend
from ucudnn.config import Config
from ucudnn.distributed.agreement import (
    job_facts,
    kind_facts,
    require_equal,
    require_one_plan,
)
from ucudnn.distributed.board import Board, Pulse, Turns
from ucudnn.distributed.cores import Lane, bound_to, cores, host_name, lane_of
from ucudnn.distributed.journal import Journal
from ucudnn.distributed.known import packed, share_known, unpacked
from ucudnn.distributed.meeting import Group, Meeting
from ucudnn.distributed.recording import RecordingCache, Records, SealedCache
from ucudnn.errors import ConfigError, PlanError, UnsupportedError
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.tuning import tuner
from ucudnn.tuning.progress import Progress, UntunedWarning

if TYPE_CHECKING:
    from torch import nn

_log = logging.getLogger("ucudnn")
_POLL_S = 0.05
Layers = list[tuple[str, Problem]]
Report = Callable[[Progress], None] | None


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts of waiting for other ranks.

    Args:
        timeout_s: for one that does not come to a meeting.
        lease_s: for a sign of life from one that measures; then others adopt its kernel.
    """

    timeout_s: float = 300.0
    lease_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("timeout_s", "lease_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)!r}")


def tune(
    model: nn.Module,
    example_inputs: Any,
    config: Config | None = None,
    group: Group = None,
    on_progress: Report = None,
    patience: Patience | None = None,
) -> Plan:
    """Like `ucudnn.tune`, in all ranks of a job at once; every rank gets the plan for its device.

    Call it on all ranks after `init_process_group` and before the model is wrapped. Ranks on
    devices of one kind share the work; what was measured before, also by a job that was killed, is
    not measured again.

    >>> import tempfile, torch
    >>> config = Config(policy="undivided", cache=tempfile.mkdtemp())
    >>> plan = tune(torch.nn.Conv2d(3, 8, 3), torch.empty(2, 3, 9, 9), config)  # this process alone
    >>> sorted(kernel.problem.op for kernel in plan.kernels)
    ['fprop', 'wgrad']

    Args:
        model: the same on all ranks.
        example_inputs: with the batch of one rank.
        config: the same on all ranks; the cache may be a folder of each host or one of all. After
            `time_budget_s` no rank begins another kernel; those left over run torch's own
            convolution.
        group: the ranks that take part; None: all.
        on_progress: called after every measurement of this rank.
        patience: how long to wait for other ranks.

    Raises:
        RankError: ranks differ, or do not come; the message names them.
        ConfigError: the model does not accept the inputs or computes no convolution.
        PlanError: no plan of some kernel fits the workspace limit; all ranks raise it.
    """
    from ucudnn.execution.layout import memory_format_of
    from ucudnn.tracing import trace_layers

    config = config or Config()
    traced = trace_layers(model, example_inputs, config.ops)
    plan = tune_problems(traced.layers, config, group, on_progress, patience, traced.biased)
    return replace(plan, memory_format=memory_format_of(model))


def tune_problems(
    layers: Iterable[tuple[str, Problem]],
    config: Config | None = None,
    group: Group = None,
    on_progress: Report = None,
    patience: Patience | None = None,
    biased: Collection[Problem] = (),
) -> Plan:
    """Like `ucudnn.tuning.tuner.tune_problems`, in all ranks of a job at once.

    Args:
        layers: the name of a layer and its problem, once per call; the same on all ranks whose
            devices are of one kind.
        config: the same on all these ranks.
        group: the ranks that take part; None: all.
        on_progress: called after every measurement of this rank.
        patience: how long to wait for other ranks.
        biased: of the problems those to whose result a layer adds a bias; the same likewise.

    Raises:
        RankError: ranks differ, or do not come; the message names them.
        ConfigError: there is no problem to plan.
        PlanError: no plan of some problem fits the workspace limit; all ranks raise it.
    """
    config, patience = config or Config(), patience or Patience()
    if config.total_bytes is not None:
        raise ConfigError(
            "total_workspace is one pool of all kernels, which ranks that measure a part of them "
            "cannot divide; tune in one process and load its plan, or set workspace_limit"
        )
    if config.layout != "keep":
        raise ConfigError(
            f"layout={config.layout!r} is decided by whole steps of a model, which ranks that "
            f"measure a part of its kernels do not take; tune in one process and load its plan, or "
            f"set layout='keep'"
        )
    listed = list(layers)
    if not listed:
        raise ConfigError("there is no convolution to plan: pass the layers of a model")
    with ExitStack() as stack:
        meeting = stack.enter_context(Meeting("tune", group, patience.timeout_s))
        team = _form_team(meeting, listed, config, biased)
        journal = stack.enter_context(Journal(meeting, config.cache))
        store = PrefixStore(team.name, meeting.store)
        pulse = stack.enter_context(Pulse(store, meeting.rank, patience.lease_s))
        work = _Work(listed, config, journal, on_progress, biased)
        heads = [_relatives(part[0][1]) for part in work.parts]
        share_known(meeting, team.ranks, journal, open_backend(config.backend), heads, _relatives)
        costly_first = sorted(range(len(heads)), key=lambda item: -_flops(work.parts[item]))
        board = Board(store, meeting.rank, costly_first, pulse)
        turns = Turns(store, str(team.lane.ranks), team.lane.ranks, meeting.rank, pulse)
        with bound_to(team.lane.processors) if team.lane.processors else nullcontext():
            _measure_all(work, board, turns)
        results = [unpacked(board.result(item)) for item in range(len(work.parts))]
        plan, sealed = _decide(listed, config, dict(zip(heads, results, strict=True)), biased)
        require_one_plan(meeting, plan)
        journal.publish(sealed.entries(), team.ranks)
    _log.info("ranks %s agreed on plan %s", team.ranks, plan.hash)
    return plan


def _decide(
    layers: Layers, config: Config, results: Mapping[Problem, object], biased: Collection[Problem]
) -> tuple[Plan, SealedCache]:
    """The plan that all records lead to, of the kernels that there was time for."""
    records = {head: one for head, one in results.items() if isinstance(one, Records)}
    tuned = [(name, problem) for name, problem in layers if _relatives(problem) in records]
    if len(tuned) < len(layers):
        warnings.warn(
            f"{len(layers) - len(tuned)} of {len(layers)} calls are not in the plan and run "
            f"torch's own convolution: time_budget_s={config.time_budget_s} was over; raise it, or "
            f"tune again and go on from what is in the cache",
            UntunedWarning,
            stacklevel=3,
        )
    sealed = SealedCache(records.values())
    untimed = replace(config, time_budget_s=None)
    plan = tuner.tune_problems(tuned, untimed, None, sealed, biased=biased, is_whole_step=False)
    return replace(plan, config=config), sealed


@dataclass(frozen=True, slots=True)
class _Team:
    """The ranks that share work: those with devices of one kind.

    Args:
        name: different for each kind.
        ranks: in order.
        lane: where this rank measures; no processors: wherever the system puts it.
    """

    name: str
    ranks: tuple[int, ...]
    lane: Lane


def _form_team(
    meeting: Meeting, layers: Layers, config: Config, biased: Collection[Problem]
) -> _Team:
    """Find the ranks of this one's kind, and make sure that they are about to do the same.

    Raises:
        RankError: they are not.
    """
    backend = open_backend(config.backend)
    device, software = backend.device(), backend.software()
    conditions = asdict(backend.conditions())
    problems = {
        f"problem {number}": _text(one) + (", with a bias" if one in biased else "")
        for number, (_, one) in enumerate(layers)
    }
    said = {
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
    heard = meeting.exchange("work", said)
    require_equal({rank: one["job"] for rank, one in heard.items()})
    kinds = list(dict.fromkeys(one["kind"] for one in heard.values()))
    for kind in kinds:
        require_equal({rank: one["team"] for rank, one in heard.items() if one["kind"] == kind})
    mine = {rank: one for rank, one in heard.items() if one["kind"] == said["kind"]}
    lane = Lane((), (meeting.rank,))
    if device.type == "cpu":
        here = {rank: one["cores"] for rank, one in mine.items() if one["host"] == said["host"]}
        lane = lane_of(meeting.rank, here, backend.conditions().threads)
    return _Team(f"kind {kinds.index(str(said['kind']))}", tuple(mine), lane)


def _text(problem: Problem) -> str:
    return ", ".join(f"{name}={value}" for name, value in problem.to_dict().items())


class _Work:
    """The kernels in parts that share no measurement, and how this rank tunes one of them.

    Args:
        layers: of the whole job.
        config: the settings.
        journal: where measurements go.
        on_progress: told of this rank's measurements.
        biased: of the problems those to whose result a layer adds a bias.
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
            groups.setdefault(_relatives(problem), []).append((name, problem))
        self.parts = list(groups.values())
        self._config = replace(config, time_budget_s=None)
        self._journal, self._on_progress, self._biased = journal, on_progress, biased
        budget = config.time_budget_s
        self._until = None if budget is None else time.monotonic() + budget
        self._measured = self._reused = 0

    def tune(self, item: int, done: Callable[[], int]) -> bytes:
        """Measure one part; its records, None after the time, or the error that ends all ranks."""
        if self._until is not None and time.monotonic() > self._until:
            return packed(None)
        recording = RecordingCache(self._journal.cache)
        kernels_done = done()
        try:
            told, part = self._told(kernels_done), self.parts[item]
            tuner.tune_problems(
                part, self._config, told, recording, biased=self._biased, is_whole_step=False
            )
        except (PlanError, UnsupportedError) as error:  # of the problem, not of this rank
            return packed(error)
        return packed(recording.records())

    def _told(self, done: int) -> Report:
        if self._on_progress is None:
            return None
        report, measured, reused = self._on_progress, self._measured, self._reused

        def pass_on(event: Progress) -> None:
            self._measured, self._reused = measured + event.measured, reused + event.reused
            report(
                replace(
                    event,
                    done=done,
                    total=len(self.parts),
                    measured=self._measured,
                    reused=self._reused,
                    seconds_left=None,
                )
            )

        return pass_on


def _relatives(problem: Problem) -> Problem:
    """Stands for all problems whose measurements may be the same, by micro-batches or by slabs.

    A smaller batch of one may be measured for the other, or a slab, whose outermost size and
    padding differ.
    """
    kernel = problem.dilation[0] * (problem.kernel_size[0] - 1) + 1
    return replace(
        problem.with_batch(1),
        input_size=(kernel, *problem.input_size[1:]),
        padding=((0, 0), *problem.padding[1:]),
    )


def _flops(part: Layers) -> int:
    return sum(problem.flops for problem in {problem for _, problem in part})


def _measure_all(work: _Work, board: Board, turns: Turns) -> None:
    """Measure whatever is to be had until everything is done, by whomever."""
    everything = range(len(work.parts))
    while not board.are_done(everything):
        item = None
        if turns.is_mine():
            item = board.claim()
            if item is not None:
                board.finish(item, work.tune(item, lambda: board.count_done(everything)))
            turns.pass_on()
        if item is None:
            time.sleep(_POLL_S)
