"""Errors for kernels without a plan that fits, with the smallest limit that would do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ucudnn.errors import PlanError
from ucudnn.units import format_bytes

if TYPE_CHECKING:
    from ucudnn.config import Config
    from ucudnn.measurement import Measurement
    from ucudnn.problem import Problem
    from ucudnn.tuning.sources import AbstractSource, Evidence


def nothing_fits(source: AbstractSource, evidence: Evidence, call_overhead_bytes: int) -> PlanError:
    """Error for a limit that nothing fits.

    Args:
        source: source of the kernel's measurements.
        evidence: the measurements of what was tried.
        call_overhead_bytes: measured workspace of a whole call minus that of its largest chunk.
    """
    problem, config = source.kernel.problem, source.config
    smallest, limit = _smallest(source, evidence), source.bounds.limit
    if smallest is None:
        return _nothing_allowed(problem, config, evidence)
    least, what = smallest
    # A limit that suffices must hold the whole call, not only its largest chunk.
    least += call_overhead_bytes
    if limit is None or least <= limit:
        return PlanError(
            f"no plan for {problem} can be made of what was measured: {what}, needs "
            f"{format_bytes(least)} and was not timed; tune on the device with these settings"
        )
    more = "" if config.policy == "all" else " or allow more sizes by policy"
    # What the budget leaves a kernel is not a limit of the user's: the caller, who knows what else
    # is allocated then, says what to raise.
    if config.memory_budget is not None and source.bounds.limit != config.limit_bytes:
        return PlanError(f"its smallest plan needs {format_bytes(least)} ({what})", least)
    total, calls = config.total_bytes, len(source.kernel.layers)
    if total is None or limit == config.limit_bytes:
        return PlanError(
            f"no plan for {problem} fits workspace_limit={format_bytes(limit)}; the smallest "
            f"needs {format_bytes(least)} ({what}); raise the limit{more}",
            least,
        )
    together = f", {format_bytes(calls * least)} for its {calls} calls" if calls > 1 else ""
    return PlanError(
        f"no plan for {problem} fits its part of total_workspace={format_bytes(total)}; the "
        f"smallest needs {format_bytes(least)} ({what}){together}; raise it{more}",
        calls * least,
    )


def _nothing_allowed(problem: Problem, config: Config, evidence: Evidence) -> PlanError:
    ran = list(filter(_ran, evidence.everything))
    if config.deterministic and ran and not any(one.is_deterministic for one in ran):
        return PlanError(
            f"no deterministic algorithm computes {problem}; on a GPU "
            f"torch.use_deterministic_algorithms(True) makes torch's own convolution one"
        )
    if ran and not any(_is_exact(one, config) for one in ran):
        return PlanError(
            f"no algorithm computes {problem} within max_error={config.max_error}; the most exact "
            f"one has {min(one.error or 0.0 for one in ran):.2g}"
        )
    failed = [entry.reason for entry in evidence.everything if entry.status == "failed"]
    # What ran out of memory is no entry.
    if failed or not evidence.everything:
        reasons = "; ".join(failed) or "there was too little memory"
        return PlanError(f"no algorithm could be run on {problem}: {reasons}")
    return PlanError(
        f"{problem} has no split, because the chunks that were measured do not add up to all of "
        f"it; measure more sizes"
    )


def _ran(entry: Measurement) -> bool:
    # A candidate over the limit is run once for its workspace, and not timed. It may be the one
    # that a higher limit allows.
    return entry.workspace_bytes is not None and entry.status != "failed"


def _is_exact(entry: Measurement, config: Config) -> bool:
    return config.max_error is None or (entry.error or 0.0) <= config.max_error


def _smallest(source: AbstractSource, evidence: Evidence) -> tuple[int, str] | None:
    """The least workspace in bytes of any split, and its description; None where nothing ran."""
    config = source.config
    known = (
        [
            one
            for one in filter(_ran, entries)
            if _is_exact(one, config) and (one.is_deterministic or not config.deterministic)
        ]
        for entries in evidence.known
    )
    # Slabs may fit where no micro-batch does, as at batch 1.
    found = (table.smallest() for table in source.tables(known, limit=None))
    return min(filter(None, found), default=None, key=_least_bytes)


def _least_bytes(smallest: tuple[int, str]) -> int:
    return smallest[0]


def all_over_limit(
    refused: Mapping[Problem, PlanError], limit: int, unknown: int, is_refused: bool
) -> PlanError:
    """One error for all kernels of which nothing fits the workspace limit.

    Args:
        refused: the error of each.
        limit: workspace in bytes.
        unknown: kernels that were not looked at before the time was over.
        is_refused: True if the settings refuse to leave them to torch.
    """
    remedy = (
        ", or leave what does not fit to torch's own convolution by unplanned='torch'"
        if is_refused
        else ""
    )
    if len(refused) == 1 and not unknown:
        (error,) = refused.values()
        return PlanError(f"{error}{remedy}", error.smallest_bytes)
    needs = [(error.smallest_bytes or 0, str(problem)) for problem, error in refused.items()]
    # The largest first: its workspace is the limit that fits them all.
    needs.sort(reverse=True)
    listed = ", ".join(f"{format_bytes(need)} for {name}" for need, name in needs)
    most = format_bytes(needs[0][0])
    fits = f"fits all but {unknown} that there was no time for" if unknown else "fits all"
    return PlanError(
        f"no plan for {len(refused)} kernel{'s' * (len(refused) > 1)} fits "
        f"workspace_limit={format_bytes(limit)}; the "
        f"smallest needs {listed}; raise the limit to {most}, which {fits}{remedy}",
        needs[0][0],
    )
