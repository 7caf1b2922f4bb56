"""Compare two plans: their devices, versions, settings and splits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ucudnn.plan import KernelPlan, Plan
from ucudnn.problem import Problem


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """A field that differs between two plans, with both values as text."""

    name: str
    one: str
    other: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A kernel as each of two plans has it; None for a plan that does not have the kernel."""

    problem: Problem
    one: KernelPlan | None
    other: KernelPlan | None

    @property
    def is_same(self) -> bool:
        """True if both plans compute every batch of the kernel in the same way."""
        if self.one is None or self.other is None:
            return False
        # `decisions` leaves out times, because times differ in every run.
        return self.one.decisions() == self.other.decisions()


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """The comparison of two plans."""

    one: Plan
    other: Plan
    differences: tuple[PlanDifference, ...]
    pairs: tuple[Pair, ...]

    @property
    def is_same(self) -> bool:
        """True if both plans have equal decisions, devices and settings; versions may differ."""
        # The hash covers splits, segments, layout, device and settings, but no times or versions.
        return self.one.hash == self.other.hash

    @property
    def changed(self) -> tuple[Pair, ...]:
        """The kernels that the plans compute differently."""
        return tuple(pair for pair in self.pairs if not pair.is_same)


def compare(one: Plan, other: Plan) -> PlanComparison:
    """Compare two plans.

    >>> from ucudnn.config import Config
    >>> from ucudnn.measurement import Conditions, Device, Software
    >>> cpu, config = Device("cpu", "any"), Config()
    >>> before, after = (Plan((), cpu, Software(it), Conditions(), config) for it in ("1", "2"))
    >>> compare(before, after).differences, compare(before, after).is_same
    ((PlanDifference(name='software.torch', one='1', other='2'),), True)
    """
    kernels = [{kernel.problem: kernel for kernel in plan.kernels} for plan in (one, other)]
    # Kernels in the order of the first plan, then kernels that only the second plan has.
    problems = dict.fromkeys([*kernels[0], *kernels[1]])
    pairs = tuple(Pair(p, kernels[0].get(p), kernels[1].get(p)) for p in problems)
    return PlanComparison(one, other, tuple(_differences(one, other)), pairs)


def _differences(one: Plan, other: Plan) -> Iterator[PlanDifference]:
    if one.backend != other.backend:
        yield PlanDifference("backend", one.backend, other.backend)
    if one.memory_format != other.memory_format:
        yield PlanDifference("memory_format", one.memory_format, other.memory_format)
    if one.compiled != other.compiled:
        yield PlanDifference("compiled", _text(one.compiled), _text(other.compiled))
    for room in ("device", "software", "conditions"):
        values = [asdict(getattr(plan, room)) for plan in (one, other)]
        yield from _of_fields(room, *values)
    yield from _of_fields("config", one.config.to_dict(), other.config.to_dict())


def _of_fields(room: str, one: dict[str, Any], other: dict[str, Any]) -> Iterator[PlanDifference]:
    # The names of fields are taken from both plans, because plans made by different versions of
    # this package may have different fields.
    for name in dict.fromkeys([*one, *other]):
        values = [_text(fields.get(name)) for fields in (one, other)]
        if values[0] != values[1]:
            yield PlanDifference(f"{room}.{name}", *values)


def _text(value: Any) -> str:
    # A field that does not apply is None or empty, depending on its type; both are printed alike.
    return "none" if value in (None, "") else str(value)
