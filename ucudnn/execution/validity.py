"""Check whether what a plan states is true on this machine, without running any kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.errors import PlanError, UnsupportedError
from ucudnn.execution.execute import build, refusal_of
from ucudnn.measurement import Conditions, Software
from ucudnn.plan import KernelPlan, Plan


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement of a plan, checked on this machine.

    Args:
        about: "complete" (only if the plan is incomplete), "device", "versions", "conditions",
            "build" (whether all chunks can be computed), "determinism" (only if the plan is
            deterministic), or "canary" with the number of the kernel that was timed again.
        is_true: whether the statement still holds; None if it was not checked.
        said: the result in one sentence.
    """

    about: str
    is_true: bool | None
    said: str


def device_is_missing(plan: Plan, error: UnsupportedError) -> Finding:
    """The finding for a backend that cannot be opened here."""
    return Finding("device", False, f"the plan is for {plan.device}: {error}")


def findings_without_building(plan: Plan, backend: AbstractBackend) -> Iterator[Finding]:
    """Findings on the device; if it is the plan's, also on versions, conditions and determinism."""
    # On another device nothing more is checked, because versions and times differ there anyway.
    if backend.device() != plan.device:
        said = f"the plan is for {plan.device}, this is {backend.device()}"
        yield Finding("device", False, f"{said}; tune here, or load a plan made for this device")
        return
    yield Finding("device", True, str(plan.device))
    yield _compared("versions", plan.software, backend.software())
    yield _compared("conditions", plan.conditions, backend.conditions())
    if plan.config.deterministic:
        said = _nondeterminism(plan, backend)
        fine = "every algorithm gives the same bits on the same operands"
        yield Finding("determinism", not said, said or fine)


def findings_without_running(plan: Plan, backend: AbstractBackend) -> Iterator[Finding]:
    """All findings that need no run of a kernel; the last one, on the build, takes longest."""
    yield from findings_without_building(plan, backend)
    if backend.device() == plan.device:
        yield _built(plan, backend)


def require_valid(plan: Plan) -> None:
    """Raise an error if any statement of a plan is not true on this machine."""
    try:
        found = list(findings_without_running(plan, open_backend(plan.backend)))
    except UnsupportedError as error:
        found = [device_is_missing(plan, error)]
    wrong = [f"{finding.about}: {finding.said}" for finding in found if finding.is_true is False]
    if wrong:
        raise PlanError(
            f"unplanned='error' refuses a plan that does not hold here. {'. '.join(wrong)}. "
            f"Make the plan anew, or set unplanned='torch' to run it all the same"
        )


def _nondeterminism(plan: Plan, backend: AbstractBackend) -> str:
    """A sentence on the first algorithm of a plan whose results may vary here; "" if none do.

    On a GPU, results of torch's own convolution may vary, too. Whether they do depends on a setting
    of torch, which is not changed when a plan is followed.
    """
    for kernel in plan.kernels:
        problem = kernel.problem
        listed = (*backend.candidates(problem), *backend.candidates(problem, adds_bias=True))
        varying = {one.algorithm for one in listed if not one.is_deterministic}
        for name in kernel.algorithms:
            if name in varying:
                return (
                    f"{name} of {problem} may give other bits in every run; set "
                    f"torch.use_deterministic_algorithms(True), or tune again"
                )
    return ""


def _compared(about: str, there: Software | Conditions, here: Software | Conditions) -> Finding:
    mine = asdict(here)
    differing = ", ".join(
        f"{name} {value or 'unknown'} there and {mine[name] or 'unknown'} here"
        for name, value in asdict(there).items()
        if value != mine[name]
    )
    if differing:
        return Finding(about, False, f"{differing}; tune again to renew the times")
    # A field that does not apply is empty, such as the version of cuDNN on a CPU.
    known = (f"{name} {value}" for name, value in mine.items() if value not in ("", None))
    return Finding(about, True, ", ".join(known))


def refusals(kernel: KernelPlan, backend: AbstractBackend) -> Iterator[str]:
    """For each batch of a kernel that a backend cannot compute as planned: the reason."""
    for batch in range(1, kernel.problem.batch + 1):
        if kernel.covers(batch):
            problem = kernel.problem.with_batch(batch)
            reason = refusal_of(backend, problem, kernel.split(batch))
            if reason is not None:
                yield reason


def require_real(kernels: Iterable[KernelPlan], backend: AbstractBackend) -> None:
    """Raise an error unless a backend can compute every planned batch of every kernel."""
    for kernel in kernels:
        for reason in refusals(kernel, backend):
            raise PlanError(f"the plan of {kernel.problem} cannot be followed: {reason}")


def _built(plan: Plan, backend: AbstractBackend) -> Finding:
    wrong = []
    for number, kernel in enumerate(plan.kernels):
        found = list(refusals(kernel, backend))
        try:
            build(backend, kernel.problem, kernel.split(kernel.problem.batch))
        except UnsupportedError as error:
            found.append(str(error))
        wrong += [f"kernel {number}, {kernel.problem}: {reason}" for reason in found[:1]]
    if wrong:
        rest = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        said = f"torch's own convolution would run instead of {wrong[0]}{rest}; tune again"
        return Finding("build", False, said)
    said = f"every chunk of every batch of all {len(plan.kernels)} kernels can be computed"
    return Finding("build", True, said)
