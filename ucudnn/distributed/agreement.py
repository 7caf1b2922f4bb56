"""Agreement of all ranks on plan, versions and devices, or an error that names who differs.

Ranks that follow different plans wait for the slowest of them in every step, which nothing
reports. So plans are compared before the first step, field by field, and the message names the
field.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from ucudnn.backends import open_backend
from ucudnn.distributed.rendezvous import Group, Rendezvous, name_ranks
from ucudnn.errors import PlanError, RankError, UcudnnError
from ucudnn.measurement import Device, Software
from ucudnn.plan import Plan
from ucudnn.system.version import own_version

# How many differences a message lists: one wrong version changes every kernel.
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
    >>> agree(plan) is plan  # without a process group: this process alone
    True

    Args:
        plan: the plan that this rank would follow.
        group: the ranks that take part; None: all.
        timeout_s: how long to wait for a rank that does not arrive.

    Returns:
        The same plan.

    Raises:
        RankError: ranks differ, or do not arrive; the message names them, and what differs.
    """
    with Rendezvous("agree", group, timeout_s) as rendezvous:
        require_one_plan(rendezvous, plan)
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
        timeout_s: how long to wait for a rank that does not arrive.

    Raises:
        RankError: a rank cannot read its plan, or ranks differ; the message names them.
    """
    # A string is a sequence, too: of its characters.
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    with Rendezvous("load", group, timeout_s) as rendezvous:
        plans: list[Plan] = []
        error = None
        if src in (None, rendezvous.rank):
            try:
                plans = [Plan.load(one) for one in paths]
            except UcudnnError as caught:
                # Sent to all ranks, which raise it together: the others would wait for this one.
                error = str(caught)
        return _distribute(rendezvous, plans, error, src)


def broadcast(
    plan: Plan | None, src: int = 0, group: Group = None, timeout_s: float = 300.0
) -> Plan:
    """Send the plan of one rank to all, and agree on it.

    Args:
        plan: the plan, on the rank that has it; the others may pass None.
        src: the rank that has it, in the numbers of the default group.
        group: the ranks that take part; None: all.
        timeout_s: how long to wait for a rank that does not arrive.

    Raises:
        RankError: that rank has none or does not take part, or ranks differ.
    """
    with Rendezvous("broadcast", group, timeout_s) as rendezvous:
        plans = [plan] if plan is not None and rendezvous.rank == src else []
        error = "it has no plan to send" if rendezvous.rank == src and not plans else None
        return _distribute(rendezvous, plans, error, src)


def _distribute(
    rendezvous: Rendezvous, plans: list[Plan], error: str | None, src: int | None
) -> Plan:
    """The plan for this rank's device, from this rank's plans or those of rank `src`."""
    if src is not None and src not in rendezvous.ranks:
        raise RankError(f"src must be one of {name_ranks(rendezvous.ranks)}, got {src}")
    # Where every rank reads for itself there is nothing to send.
    documents = [plan.to_dict() for plan in plans] if src is not None else []
    received = rendezvous.exchange("plans", {"error": error, "plans": documents})
    raise_errors({rank: one["error"] for rank, one in received.items()})
    if src is not None:
        plans = [Plan.from_dict(document) for document in received[src]["plans"]]
    chosen, error = None, None
    try:
        chosen = _for_this_device(plans)
    except PlanError as caught:
        # The other ranks must end, too, rather than wait for this one in the next exchange.
        error = str(caught)
    raise_errors(rendezvous.exchange("choices", error))
    assert chosen is not None
    require_one_plan(rendezvous, chosen)
    return chosen


def _for_this_device(plans: Iterable[Plan]) -> Plan:
    made_for = []
    # One plan per kind of device: that of this rank is the one made for its kind.
    for plan in plans:
        device = open_backend(plan.backend).device()
        if plan.device == device:
            return plan
        made_for.append(f"{plan.device}, not for the {device} of this rank")
    raise PlanError(
        f"the plan was made for {'; another for '.join(made_for)}; tune there, or load a plan made "
        f"for that device"
    )


def require_one_plan(rendezvous: Rendezvous, plan: Plan) -> None:
    """Compare plans, versions and devices over the ranks of a rendezvous.

    Raises:
        RankError: ranks differ.
    """
    # A rank with an error takes part in the exchange all the same, or the others would wait for it.
    error = None
    try:
        _for_this_device([plan])
    except UcudnnError as caught:
        error = str(caught)
    backend = open_backend(plan.backend) if error is None else None
    # Without a backend only what the plan says is known; the error ends the job anyway.
    kind = backend.device() if backend else plan.device
    software = backend.software() if backend else plan.software
    sent = {
        "error": error,
        "kind": str(asdict(kind)),
        "job": job_facts(software),
        "team": {**kind_facts(kind, software), **_plan_facts(plan)},
    }
    received = rendezvous.exchange("plan", sent)
    raise_errors({rank: one["error"] for rank, one in received.items()})
    require_equal_teams(received)


def job_facts(software: Software) -> dict[str, str]:
    """Settings that must be equal on all ranks of a job, whatever their devices."""
    return {"ucudnn": own_version(), "torch": software.torch}


def kind_facts(device: Device, software: Software) -> dict[str, str]:
    """Settings that must be equal on all ranks with devices of one kind."""
    versions = {f"version of {name}": text for name, text in asdict(software).items()}
    return {"device": str(device), **versions}


def _plan_facts(plan: Plan) -> dict[str, str]:
    """The fields of a plan, so that a difference can be named."""
    made_with = {f"{name} that the plan was made with": str(text) for name, text in _made(plan)}
    # The split of the largest batch is for people; the digest covers all batches.
    kernels = {
        f"plan of {kernel.problem}": f"{kernel.split(kernel.problem.batch)}, over all batches "
        f"{_digest(kernel.decisions())}"
        for kernel in plan.kernels
    }
    settings = {f"plan's {name}": str(value) for name, value in plan.config.to_dict().items()}
    # Last, because the pieces above say more and a message lists the first differences only.
    whole = {"number of kernels in the plan": str(len(plan.kernels)), "hash of the plan": plan.hash}
    return {**made_with, **settings, **kernels, **whole}


def _made(plan: Plan) -> Iterable[tuple[str, Any]]:
    yield "backend", plan.backend
    yield from asdict(plan.software).items()
    yield from asdict(plan.conditions).items()


def _digest(value: object) -> str:
    # Eight digits, because people read them in a message.
    return sha256(repr(value).encode()).hexdigest()[:8]


def raise_errors(errors: Mapping[int, str | None]) -> None:
    """Raise the errors of some ranks on all of them.

    >>> raise_errors({0: None, 1: "it has no plan to send"})
    Traceback (most recent call last):
    ucudnn.errors.RankError: no rank starts, because of rank 1: it has no plan to send

    Args:
        errors: for each rank the message of its error, or None.

    Raises:
        RankError: a rank has an error.
    """
    messages = {rank: text for rank, text in errors.items() if text is not None}
    if messages:
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in messages.items())
        raise RankError(f"no rank starts, because of {listed}", tuple(messages))


def require_equal_teams(received: Mapping[int, Mapping[str, Any]]) -> None:
    """Compare the facts that ranks sent: "job" over all ranks, "team" over those of one "kind".

    Raises:
        RankError: they differ.
    """
    require_equal({rank: one["job"] for rank, one in received.items()})
    for kind in dict.fromkeys(one["kind"] for one in received.values()):
        require_equal({rank: one["team"] for rank, one in received.items() if one["kind"] == kind})


def require_equal(facts: Mapping[int, Mapping[str, str]]) -> None:
    """Compare facts over ranks by name; the message names the ranks that are in the minority.

    Of two groups of equal size the one with the lowest rank counts as the majority.

    >>> require_equal({0: {"torch": "2.13"}, 1: {"torch": "2.12"}})
    Traceback (most recent call last):
    ucudnn.errors.RankError: ranks differ: torch is 2.12 on rank 1, but 2.13 on rank 0; ...

    Raises:
        RankError: they differ.
    """
    # In a fixed order: the message must be the same on all ranks.
    names = dict.fromkeys(name for sent in facts.values() for name in sent)
    sentences: list[str] = []
    named: dict[int, None] = {}
    for name in names:
        # Ranks come in ascending order and `most_common` keeps the order of equal counts, so a tie
        # goes to the lowest rank.
        ranks_by_text: dict[str, list[int]] = {}
        for rank, sent in facts.items():
            ranks_by_text.setdefault(sent.get(name, "not there"), []).append(rank)
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
