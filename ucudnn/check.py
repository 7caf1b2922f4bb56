"""Check that a plan still holds on this machine: device, versions, algorithms and some times."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ucudnn.axis import axis_of
from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.benchmark.rounds import Result
from ucudnn.benchmark.statistics import median_ns, ratio_interval
from ucudnn.cache import MemoryCache
from ucudnn.errors import ConfigError, UnsupportedError
from ucudnn.execution.validity import Finding, device_is_missing, findings_without_running
from ucudnn.kernels.device import Session
from ucudnn.plan import KernelPlan, Plan, Split
from ucudnn.units import format_bytes, format_ns, format_sizes
from ucudnn.verdict import LOST_SPEEDUP


def check(plan: Plan, canaries: int = 3) -> Iterator[Finding]:
    """Check whether a plan still holds on this machine; neither the plan nor the cache is changed.

    The `canaries` kernels by which the plan saves most time are timed again.

    >>> from ucudnn import Config
    >>> backend = open_backend("torch_cpu")
    >>> plan = Plan((), backend.device(), backend.software(), backend.conditions(), Config())
    >>> {finding.about: finding.is_true for finding in check(plan)}
    {'device': True, 'versions': True, 'conditions': True, 'build': True, 'canary': None}
    """
    if canaries < 0:
        raise ConfigError(f"canaries must be at least 0, got {canaries}")
    try:
        backend = open_backend(plan.backend)
    except UnsupportedError as error:
        yield device_is_missing(plan, error)
        return
    if plan.left_out:
        count = len(plan.left_out)
        some = f"{count} kernel{'s' * (count > 1)}"
        said = f"it lacks {some}, or some batches of {'them' if count > 1 else 'it'}; tune again"
        yield Finding("complete", None, said)
    yield from findings_without_running(plan, backend)
    if backend.device() == plan.device:
        yield from _canaries(plan, backend, canaries)


def _canaries(plan: Plan, backend: AbstractBackend, count: int) -> Iterator[Finding]:
    planned = [entry for entry in enumerate(plan.kernels) if not entry[1].is_default]
    # Kernels without a time of torch's own convolution come last.
    planned.sort(key=lambda entry: (entry[1].default is None, -entry[1].saved_ns))
    chosen = planned[:count]
    if not chosen:
        reason = "none was asked for" if planned else "every kernel is torch's own convolution"
        yield Finding("canary", None, f"not timed: {reason}")
        return
    # This session has an empty cache in memory. So every canary is timed anew, and the user's cache
    # is neither read nor written.
    session = Session(backend, MemoryCache())
    try:
        for number, kernel in chosen:
            # The caller's autograd and autocast must not change what is timed.
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                found = _canary(f"canary {number}", plan, kernel, session)
            yield found
    finally:
        session.close()


def _canary(about: str, plan: Plan, kernel: KernelPlan, session: Session) -> Finding:
    problem, split = kernel.problem, kernel.split(kernel.problem.batch)
    # A plan does not say whether its layers have a bias. It is known that they have one if the
    # split has an algorithm that adds a bias.
    fused = {one.algorithm for one in session.backend.candidates(problem, adds_bias=True)}
    has_bias = any(chunk.algorithm in fused for chunk in split.chunks)
    # The plan's split and torch's own convolution are timed in one call of `whole`, because only
    # times that are taken together can be compared.
    splits = [split] if kernel.default is None else [split, Split.default(problem.batch)]
    try:
        wholes = session.bench(axis_of(problem, split)).whole(splits, has_bias)
    except UnsupportedError as error:
        return Finding(about, None, f"not timed: {error}")
    return _judged(about, plan, kernel, wholes)


def _judged(about: str, plan: Plan, kernel: KernelPlan, wholes: list[Result]) -> Finding:
    ours = wholes[0]
    if ours.failure:
        return Finding(about, False, f"{kernel.problem} cannot be run: {ours.failure.reason}")
    limit = plan.limit_bytes(kernel)
    if limit is not None and ours.workspace_bytes > limit:
        size, most = format_sizes(ours.workspace_bytes, limit)
        said = f"{kernel.problem} needs {size} of workspace, over {most}; tune again"
        return Finding(about, False, said)
    size = format_bytes(ours.workspace_bytes)
    said = f"{kernel.problem} takes {format_ns(median_ns(ours.samples))} in {size}"
    if len(wholes) == 1 or wholes[1].failure:
        return Finding(about, True, f"{said}, and torch's own convolution cannot be timed")
    theirs = wholes[1]
    ratio, low, high = ratio_interval(theirs.samples, ours.samples)
    said += f", torch's own convolution {ratio:.2f} times that (95 % {low:.2f} to {high:.2f})"
    assert kernel.default is not None
    planned = kernel.default.time_ns / kernel.timing.time_ns
    # `ratio` is the time of torch's own convolution divided by that of the plan's split, as just
    # timed; `planned` is this ratio as it was when the kernel was tuned. A small change of the
    # ratio is no failure, because the split may still be right.
    said += f"; {planned:.2f} when it was tuned"
    # The check fails if torch's own convolution is now faster beyond the noise and needs no more
    # workspace than the limit. It also fails if the ratio has fallen by more than `LOST_SPEEDUP`.
    if high < 1 and (limit is None or theirs.workspace_bytes <= limit):
        return Finding(about, False, f"{said}; it fits and is faster now: tune again")
    if high * LOST_SPEEDUP < planned:
        return Finding(about, False, f"{said}; the kernel is much slower than it was: tune again")
    return Finding(about, True, said)
