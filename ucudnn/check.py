"""Check that a plan still holds here: device, versions, what can be built, and some times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from ucudnn.axis import axis_of
from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.benchmark.bench import Whole
from ucudnn.benchmark.statistics import median_ns, ratio_interval
from ucudnn.cache import MemoryCache
from ucudnn.errors import ConfigError, UnsupportedError
from ucudnn.execution.execute import build
from ucudnn.plan import DEFAULT_ALGORITHM, KernelPlan, Plan, Split, Step
from ucudnn.tuning.session import Session
from ucudnn.units import format_bytes, format_ns


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement of a plan, checked on this machine.

    Args:
        about: "device", "complete", "versions", "conditions", "build", or "canary" with the
            kernel's number.
        is_true: whether it still holds; None if it was not checked.
        said: the result in one sentence.
    """

    about: str
    is_true: bool | None
    said: str


def check(
    plan: Plan, canaries: int = 3, on_finding: Callable[[Finding], None] = lambda _: None
) -> list[Finding]:
    """Check a plan against this machine; nothing is cached and the plan does not change.

    >>> from ucudnn import Config
    >>> backend = open_backend("torch_cpu")
    >>> plan = Plan((), backend.device(), backend.software(), backend.conditions(), Config())
    >>> {finding.about: finding.is_true for finding in check(plan)}
    {'device': True, 'versions': True, 'conditions': True, 'build': True, 'canary': None}

    Args:
        plan: to check.
        canaries: number of kernels to time again, in turn with torch's own convolution: those with
            the largest savings according to the plan.
        on_finding: called with each finding as soon as it is known.

    Raises:
        ConfigError: canaries is negative.
    """
    if canaries < 0:
        raise ConfigError(f"canaries must be at least 0, got {canaries}")
    found = []
    for finding in _findings(plan, canaries):
        on_finding(finding)
        found.append(finding)
    return found


def _findings(plan: Plan, canaries: int) -> Iterator[Finding]:
    try:
        backend = open_backend(plan.backend)
    except UnsupportedError as error:
        yield Finding("device", False, f"the plan is for {plan.device}: {error}")
        return
    # On another device versions and times would differ for that reason alone.
    if backend.device() != plan.device:
        said = f"the plan is for {plan.device}, this is {backend.device()}"
        yield Finding("device", False, f"{said}; tune here, or load a plan made for this device")
        return
    yield Finding("device", True, str(plan.device))
    if plan.left_out:
        count = len(plan.left_out)
        said = f"{count} of {count + len(plan.kernels)} kernels are not in it, tune again to go on"
        yield Finding("complete", None, said)
    there, here = asdict(plan.software), asdict(backend.software())
    yield _compared("versions", there, here)
    conditions = asdict(plan.conditions), asdict(backend.conditions())
    yield _compared("conditions", *conditions)
    yield _built(plan, backend)
    yield from _canaries(plan, backend, canaries)


def _compared(about: str, there: dict[str, object], here: dict[str, object]) -> Finding:
    differing = [
        f"{name} {there[name] or 'unknown'} there and {here[name] or 'unknown'} here"
        for name in there
        if there[name] != here[name]
    ]
    if differing:
        return Finding(about, False, f"{', '.join(differing)}; tune again to renew the times")
    # A field is empty where it does not apply, such as the version of cuDNN on a CPU.
    known = (f"{name} {value}" for name, value in here.items() if value not in ("", None))
    return Finding(about, True, ", ".join(known))


def _built(plan: Plan, backend: AbstractBackend) -> Finding:
    refusals = []
    for number, kernel in enumerate(plan.kernels):
        try:
            build(backend, kernel.problem, kernel.split(kernel.problem.batch))
        except UnsupportedError as error:
            refusals.append(f"kernel {number}, {kernel.problem}: {error}")
    if refusals:
        rest = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
        said = f"torch's own convolution would run instead of {refusals[0]}{rest}; tune again"
        return Finding("build", False, said)
    return Finding("build", True, f"the splits of all {len(plan.kernels)} kernels can be built")


def _saved_ns(kernel: KernelPlan) -> int:
    # Nothing is known to be saved where torch's own convolution was not measured.
    default_ns = kernel.default.time_ns if kernel.default else 0
    return (default_ns - kernel.timing.time_ns) * len(kernel.layers)


def _canaries(plan: Plan, backend: AbstractBackend, count: int) -> Iterator[Finding]:
    planned = [entry for entry in enumerate(plan.kernels) if not entry[1].is_default]
    chosen = sorted(planned, key=lambda entry: -_saved_ns(entry[1]))[:count]
    if not chosen:
        reason = "none was asked for" if planned else "every kernel is torch's own convolution"
        yield Finding("canary", None, f"not timed: {reason}")
        return
    # An empty cache in memory: every canary is timed anew, and nothing outlives the check.
    session = Session(backend, MemoryCache(), isolated=backend.in_worker)
    try:
        # The caller's autograd and autocast must not change what is timed.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for number, kernel in chosen:
                yield _canary(f"canary {number}", plan, kernel, session)
    finally:
        session.close()


def _canary(about: str, plan: Plan, kernel: KernelPlan, session: Session) -> Finding:
    problem, split = kernel.problem, kernel.split(kernel.problem.batch)
    # A plan does not say which layers have a bias, but some algorithms exist only with one.
    fused = {one.algorithm for one in session.backend.bias_candidates(problem)}
    has_bias = any(step.algorithm in fused for step in split.steps)
    default = Split("batch", (Step(problem.batch, DEFAULT_ALGORITHM),))
    # Both in one call: only times that are taken side by side can be compared.
    splits = [split] if kernel.default is None else [split, default]
    try:
        wholes = session.bench(axis_of(problem, split)).whole(splits, has_bias)
    except UnsupportedError as error:
        return Finding(about, None, f"not timed: {error}")
    return _judged(about, plan, kernel, wholes)


def _judged(about: str, plan: Plan, kernel: KernelPlan, wholes: list[Whole]) -> Finding:
    ours = wholes[0]
    if ours.result.failure:
        return Finding(
            about, False, f"{kernel.problem} cannot be run: {ours.result.failure.reason}"
        )
    limit = plan.config.limit_bytes
    if plan.config.total_bytes is not None:  # what it has of the pool, and what is left of that
        left = plan.config.total_bytes - plan.workspace_bytes
        limit = kernel.timing.workspace_bytes + left // len(kernel.layers)
    size = format_bytes(ours.workspace_bytes)
    if limit is not None and ours.workspace_bytes > limit:
        said = f"{kernel.problem} needs {size} of workspace, over {format_bytes(limit)}; tune again"
        return Finding(about, False, said)
    said = f"{kernel.problem} takes {format_ns(median_ns(ours.result.samples))} in {size}"
    if len(wholes) == 1 or wholes[1].result.failure:
        return Finding(about, True, f"{said}, and torch's own convolution cannot be timed")
    theirs = wholes[1]
    ratio, low, high = ratio_interval(theirs.result.samples, ours.result.samples)
    said += f", torch's own convolution {ratio:.2f} times that (95 % {low:.2f} to {high:.2f})"
    assert kernel.default is not None
    then = kernel.default.time_ns / kernel.timing.time_ns
    # The plan may be right to split all the same, so this is no reason to say no.
    outside = "" if low <= then <= high else ", which is outside of that interval"
    said += f"; the plan says {then:.2f}{outside}"
    # Beyond the noise, and only where the plan's own limit would have let torch's run.
    if high < 1 and (limit is None or theirs.workspace_bytes <= limit):
        return Finding(about, False, f"{said}; it fits and is faster now: tune again")
    return Finding(about, True, said)
