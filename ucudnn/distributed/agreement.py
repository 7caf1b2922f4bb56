"""Check that all ranks agree on plan, versions and devices; an error names ranks that differ.

If ranks follow different plans, all wait for the slowest rank in every step, and no error tells so.
So plans are compared before the first step, field by field, and the error names the fields that
differ.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import ucudnn
from ucudnn.backends.registry import identify
from ucudnn.distributed.rendezvous import Group, Rendezvous, name_ranks
from ucudnn.errors import PlanError, RankError, UcudnnError
from ucudnn.measurement import Device, Software
from ucudnn.plan import Plan

# An error lists at most this many differences, because a single wrong version may change every
# kernel.
_MOST_NAMED = 5
PathLike = str | os.PathLike[str]


def agree(plan: Plan, group: Group = None, timeout_s: float = 300.0) -> Plan:
    """Check that ranks with equal devices follow equal plans; call this before the first step.

    Ranks with devices of one kind must have equal plans, made for that kind of device, and equal
    versions of software. All ranks of the job must run the same versions of torch and ucudnn.

    >>> from ucudnn import Config
    >>> from ucudnn.measurement import Conditions
    >>> plan = Plan((), *identify("torch_cpu"), Conditions(), Config(), "torch_cpu")
    >>> agree(plan) is plan  # without a process group: this process alone
    True

    Args:
        plan: the plan that this rank would follow.
        group: the ranks that take part; None: all.
        timeout_s: seconds to wait for a rank that does not arrive.

    Returns:
        The same plan.

    Raises:
        RankError: ranks differ or do not arrive; the message names these ranks and what differs.
    """
    with Rendezvous("agree", group, timeout_s) as rendezvous:
        return _agreed(rendezvous, lambda: [plan])


def load(
    path: PathLike | Sequence[PathLike],
    group: Group = None,
    src: int | None = None,
    timeout_s: float = 300.0,
) -> Plan:
    """Read a plan on every rank, or on one rank that sends it to all; check it as `agree` does.

    Args:
        path: the file of a plan. In a job with devices of several kinds: one file per kind; each
            rank takes the plan that was made for its device.
        group: the ranks that take part; None: all.
        src: the rank that reads the file; None: every rank reads it, as from a shared folder.
        timeout_s: seconds to wait for a rank that does not arrive.

    Raises:
        RankError: a rank cannot read its plan, or ranks differ; the message names them.
    """
    # Strings are tested for first, because a string is also a sequence: of characters.
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)

    def read() -> list[Plan]:
        return [Plan.load(one) for one in paths]

    with Rendezvous("load", group, timeout_s) as rendezvous:
        return _agreed(rendezvous, read, src)


def broadcast(
    plan: Plan | None, src: int = 0, group: Group = None, timeout_s: float = 300.0
) -> Plan:
    """Send the plan of one rank to all other ranks, and check it as `agree` does.

    Args:
        plan: the plan, on rank `src`; other ranks may pass None.
        src: the rank that sends its plan, as numbered in the default group.
        group: the ranks that take part; None: all.
        timeout_s: seconds to wait for a rank that does not arrive.

    Raises:
        RankError: rank `src` has no plan or does not take part, or ranks differ.
    """

    def given() -> list[Plan]:
        if plan is None:
            raise PlanError("it has no plan to send")
        return [plan]

    with Rendezvous("broadcast", group, timeout_s) as rendezvous:
        return _agreed(rendezvous, given, src)


def _agreed(rendezvous: Rendezvous, get: Callable[[], list[Plan]], src: int | None = None) -> Plan:
    """The plan for this rank's device, after a check that the plans of all ranks agree.

    Without `src`, every rank calls `get` for its plans. With `src`, only rank `src` calls `get`,
    and sends the plans to all ranks.
    """
    if src not in (None, *rendezvous.ranks):
        raise RankError(f"src must be one of {name_ranks(rendezvous.ranks)}, got {src}")
    sent: dict[str, Any] = {"error": None}
    plan: Plan | None = None
    plans: list[Plan] | None = None
    try:
        try:
            if src in (None, rendezvous.rank):
                plans = get()
        finally:
            # The other ranks wait for `src`, even if it has no plans to send.
            if src is not None:
                plans = rendezvous.exchange("plans", plans)[src]
        if plans is not None:
            plan, kind, software = _for_this_device(plans)
            sent |= {
                "kind": str(asdict(kind)),
                "job": job_facts(software),
                "team": {**kind_facts(kind, software), **_plan_facts(plan)},
            }
    except UcudnnError as caught:
        # The error is sent to all ranks, which raise it together. Otherwise they would wait for
        # this rank.
        sent["error"] = str(caught)
    received = rendezvous.exchange("plan", sent)
    raise_errors({rank: one["error"] for rank, one in received.items()})
    require_equal_teams(received)
    assert plan is not None  # else `raise_errors` has raised this rank's or the sender's error
    return plan


def _for_this_device(plans: Iterable[Plan]) -> tuple[Plan, Device, Software]:
    made_for = []
    # There is one plan for each kind of device; this rank follows the one made for its own.
    for plan in plans:
        device, software = identify(plan.backend)
        if plan.device == device:
            return plan, device, software
        made_for.append(f"{plan.device}, not for the {device} of this rank")
    raise PlanError(
        f"the plan was made for {'; another for '.join(made_for)}; tune there, or load a plan made "
        f"for that device"
    )


def job_facts(software: Software) -> dict[str, str]:
    """Versions that must be equal on all ranks of a job, whatever their devices."""
    return {"ucudnn": ucudnn.__version__, "torch": software.torch}


def kind_facts(device: Device, software: Software) -> dict[str, str]:
    """Device and versions, which must be equal on all ranks with devices of one kind."""
    versions = {f"version of {name}": text for name, text in asdict(software).items()}
    return {"device": str(device), **versions}


def _plan_facts(plan: Plan) -> dict[str, str]:
    """The fields of a plan by name, so that an error can name the fields that differ."""
    made = {"backend": plan.backend, **asdict(plan.software), **asdict(plan.conditions)}
    made_with = {f"{name} that the plan was made with": str(text) for name, text in made.items()}
    kernels = {}
    for kernel in plan.kernels:
        # The text has the split of the largest batch, for people who read the message, and eight
        # digits of a hash of the splits of all batches, which are enough to tell them apart.
        digest = sha256(repr(kernel.decisions()).encode()).hexdigest()[:8]
        split = kernel.split(kernel.problem.batch)
        kernels[f"plan of {kernel.problem}"] = f"{split}, over all batches {digest}"
    settings = {f"plan's {name}": str(value) for name, value in plan.config.to_dict().items()}
    # These two facts come last, because the fields above say more, and an error lists only the
    # first differences.
    whole = {"number of kernels in the plan": str(len(plan.kernels)), "hash of the plan": plan.hash}
    return {**made_with, **settings, **kernels, **whole}


def raise_errors(errors: Mapping[int, str | None]) -> None:
    """Raise a RankError if any rank has an error message; None means that a rank has no error.

    >>> raise_errors({0: None, 1: "it has no plan to send"})
    Traceback (most recent call last):
    ucudnn.errors.RankError: no rank starts, because of rank 1: it has no plan to send
    """
    messages = {rank: text for rank, text in errors.items() if text is not None}
    if messages:
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in messages.items())
        raise RankError(f"no rank starts, because of {listed}", tuple(messages))


def require_equal_teams(received: Mapping[int, Mapping[str, Any]]) -> None:
    """Require equal "job" facts on all ranks, and equal "team" facts on all ranks of one "kind"."""
    require_equal({rank: one["job"] for rank, one in received.items()})
    for kind in dict.fromkeys(one["kind"] for one in received.values()):
        require_equal({rank: one["team"] for rank, one in received.items() if one["kind"] == kind})


def require_equal(facts: Mapping[int, Mapping[str, str]]) -> None:
    """Require that each fact is equal on all ranks; the error names the ranks in the minority.

    If two groups of ranks have equal size, the group with the lowest rank counts as the majority.

    >>> require_equal({0: {"torch": "2.13"}, 1: {"torch": "2.12"}})
    Traceback (most recent call last):
    ucudnn.errors.RankError: ranks differ: torch is 2.12 on rank 1, but 2.13 on rank 0; ...
    """
    # Facts are compared in a fixed order, so that the message is the same on all ranks.
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
