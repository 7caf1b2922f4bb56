"""The same plan, versions and kind of device on every rank, or an error that names who differs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.distributed.rendezvous import Group, Meeting, name_ranks
from ucudnn.errors import PlanError, RankError, UcudnnError
from ucudnn.measurement import Device, Software
from ucudnn.plan import Plan

# How many differences a message lists; one wrong version changes every kernel.
_MOST_NAMED = 5
PathLike = str | os.PathLike[str]


def agree(plan: Plan, group: Group = None, timeout_s: float = 300.0) -> Plan:
    """Check that all ranks are about to follow one plan; call it before the first step.

    Ranks whose devices are of one kind must have equal plans, made for that kind, and equal
    versions of everything that computes; all ranks must run one torch and one ucudnn.

    >>> from ucudnn import Config
    >>> from ucudnn.measurement import Conditions
    >>> backend = open_backend()
    >>> plan = Plan((), backend.device(), backend.software(), Conditions(), Config())
    >>> agree(plan) is plan  # this process alone, where there is no process group
    True

    Args:
        plan: what this rank would follow.
        group: the ranks that take part; None: all.
        timeout_s: how long to wait for a rank that does not come.

    Returns:
        The same plan.

    Raises:
        RankError: ranks differ, or do not come; the message names them, and what differs.
    """
    with Meeting("agree", group, timeout_s) as meeting:
        require_one_plan(meeting, plan)
    return plan


def load(
    path: PathLike | Sequence[PathLike],
    group: Group = None,
    src: int | None = None,
    timeout_s: float = 300.0,
) -> Plan:
    """Read a plan on every rank, or on one that sends it to the others, and agree on it.

    Args:
        path: the file of a plan; in a job with devices of several kinds one file per kind, of
            which each rank takes the one that was made for its device.
        group: the ranks that take part; None: all.
        src: the rank that reads; None: every rank reads, as from a folder that they share.
        timeout_s: how long to wait for a rank that does not come.

    Raises:
        RankError: a rank cannot read its plan, or ranks differ; the message names them.
    """
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    with Meeting("load", group, timeout_s) as meeting:
        plans: list[Plan] = []
        complaint = None
        if src in (None, meeting.rank):
            try:
                plans = [Plan.load(one) for one in paths]
            except UcudnnError as error:
                complaint = str(error)
        return _take(meeting, plans, complaint, src)


def broadcast(
    plan: Plan | None, src: int = 0, group: Group = None, timeout_s: float = 300.0
) -> Plan:
    """Send the plan of one rank to all, and agree on it.

    Args:
        plan: the plan, on the rank that has it; the others may pass None.
        src: the rank that has it, in the numbers of the default group.
        group: the ranks that take part; None: all.
        timeout_s: how long to wait for a rank that does not come.

    Raises:
        RankError: that rank has none or is not there, or ranks differ.
    """
    with Meeting("broadcast", group, timeout_s) as meeting:
        plans = [plan] if plan is not None and meeting.rank == src else []
        complaint = "it has no plan to send" if meeting.rank == src and not plans else None
        return _take(meeting, plans, complaint, src)


def _take(meeting: Meeting, plans: list[Plan], complaint: str | None, src: int | None) -> Plan:
    """The plan for this rank's device, of its own or those that another sends."""
    if src is not None and src not in meeting.ranks:
        raise RankError(f"src must be one of {name_ranks(meeting.ranks)}, got {src}")
    documents = [plan.to_dict() for plan in plans] if src is not None else []
    said = meeting.exchange("plans", {"complaint": complaint, "plans": documents})
    refuse({rank: one["complaint"] for rank, one in said.items()})
    if src is not None:
        plans = [Plan.from_dict(document) for document in said[src]["plans"]]
    chosen, complaint = None, None
    try:
        chosen = _for_this_device(plans)
    except PlanError as error:
        complaint = str(error)
    refuse(meeting.exchange("choices", complaint))
    assert chosen is not None
    require_one_plan(meeting, chosen)
    return chosen


def _for_this_device(plans: Iterable[Plan]) -> Plan:
    made_for = []
    for plan in plans:
        device = open_backend(plan.backend).device()
        if plan.device == device:
            return plan
        made_for.append(f"{plan.device}, not for the {device} of this rank")
    raise PlanError(
        f"the plan was made for {'; another for '.join(made_for)}; tune there, or load a plan made "
        f"for that device"
    )


def require_one_plan(meeting: Meeting, plan: Plan) -> None:
    """Compare plans, versions and devices over the ranks of a meeting.

    Raises:
        RankError: ranks differ.
    """
    complaint = None
    try:
        _for_this_device([plan])
    except UcudnnError as error:
        complaint = str(error)
    backend = open_backend(plan.backend) if complaint is None else None
    kind = backend.device() if backend else plan.device
    software = backend.software() if backend else plan.software
    said = {
        "complaint": complaint,
        "kind": str(asdict(kind)),
        "job": job_facts(software),
        "team": {**kind_facts(kind, software), **_plan_facts(plan)},
    }
    heard = meeting.exchange("plan", said)
    refuse({rank: one["complaint"] for rank, one in heard.items()})
    require_equal({rank: one["job"] for rank, one in heard.items()})
    for kind_text in {one["kind"] for one in heard.values()}:
        team = {rank: one["team"] for rank, one in heard.items() if one["kind"] == kind_text}
        require_equal(team)


def job_facts(software: Software) -> dict[str, str]:
    """Settings that must be equal on all ranks of a job, whatever their devices."""
    return {"ucudnn": ucudnn.__version__, "torch": software.torch}


def kind_facts(device: Device, software: Software) -> dict[str, str]:
    """Settings that must be equal on all ranks with devices of one kind."""
    versions = {f"version of {name}": text for name, text in asdict(software).items()}
    return {"device": str(device), **versions}


def _plan_facts(plan: Plan) -> dict[str, str]:
    """A plan, piece by piece, so that a difference can be named."""
    made_with = {f"{name} that the plan was made with": str(text) for name, text in _made(plan)}
    kernels = {
        f"plan of {kernel.problem}": f"{kernel.split(kernel.problem.batch)}, over all batches "
        f"{_digest(kernel.decisions())}"
        for kernel in plan.kernels
    }
    settings = {f"plan's {name}": str(value) for name, value in plan.config.to_dict().items()}
    whole = {"number of kernels in the plan": str(len(plan.kernels)), "hash of the plan": plan.hash}
    return {**made_with, **settings, **kernels, **whole}


def _made(plan: Plan) -> Iterable[tuple[str, Any]]:
    yield "backend", plan.backend
    yield from asdict(plan.software).items()
    yield from asdict(plan.conditions).items()


def _digest(value: object) -> str:
    return sha256(repr(value).encode()).hexdigest()[:8]


def refuse(complaints: Mapping[int, str | None]) -> None:
    """Stop all ranks where one has something to complain of.

    Raises:
        RankError: one has.
    """
    said = {rank: text for rank, text in complaints.items() if text is not None}
    if said:
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in said.items())
        raise RankError(f"no rank starts, because of {listed}", tuple(said))


def require_equal(facts: Mapping[int, Mapping[str, str]]) -> None:
    """Compare what ranks say, by name; the minority differs, and of two equal camps the later.

    >>> require_equal({0: {"torch": "2.13"}, 1: {"torch": "2.12"}})
    Traceback (most recent call last):
    ucudnn.errors.RankError: ranks differ: torch is 2.12 on rank 1, but 2.13 on rank 0; ...

    Raises:
        RankError: they differ.
    """
    names = dict.fromkeys(name for said in facts.values() for name in said)
    sentences: list[str] = []
    named: dict[int, None] = {}
    for name in names:
        ranks_by_text: dict[str, list[int]] = {}
        for rank, said in facts.items():
            ranks_by_text.setdefault(said.get(name, "not there"), []).append(rank)
        (common, _), *others = Counter(
            {text: len(ranks) for text, ranks in ranks_by_text.items()}
        ).most_common()
        for text, _ in others:
            sentences.append(
                f"{name} is {text} on {name_ranks(ranks_by_text[text])}, but {common} on "
                f"{name_ranks(ranks_by_text[common])}"
            )
            named.update(dict.fromkeys(ranks_by_text[text]))
    if sentences:
        more = len(sentences) - _MOST_NAMED
        rest = f"; and {more} more differences" if more > 0 else ""
        raise RankError(
            f"ranks differ: {'; '.join(sentences[:_MOST_NAMED])}{rest}; give all of them the same "
            f"software, settings and plan, or they would wait for each other in every step",
            tuple(sorted(named)),
        )
