"""Divide one pool of workspace among the kernels, by the measured front of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.problem import Problem
from ucudnn.tuning.budget import Budget
from ucudnn.tuning.division import Choices, divided
from ucudnn.tuning.memory_budget import Limits
from ucudnn.tuning.planner import KernelPlanner, survey
from ucudnn.tuning.session import Session
from ucudnn.tuning.step_shares import StepShares


class Pool:
    """Divides one pool of workspace, again and again until nothing new is measured.

    Args:
        config: the settings.
        layers_by_problem: the names of the layers that run each kernel.
        limits: workspace that each kernel may use.
        session: of the device that measures.
        shares: times and workspaces of torch's own convolutions.
        planner_of: makes the planner of a kernel, within a limit in bytes or its part of the pool.
        budget: the time for everything.
        on_work: called with the kernel that is being measured.
    """

    def __init__(
        self,
        config: Config,
        layers_by_problem: Mapping[Problem, tuple[str, ...]],
        limits: Limits,
        session: Session,
        shares: StepShares,
        planner_of: Callable[[Problem, int | None], KernelPlanner],
        budget: Budget,
        on_work: Callable[[Problem], None],
    ) -> None:
        assert config.total_bytes is not None
        self._total_bytes = config.total_bytes
        self._limits = limits
        self._config = config
        self._layers = layers_by_problem
        self._session = session
        self._shares = shares
        self._planner_of = planner_of
        self._budget = budget
        self._on_work = on_work
        self._choices: dict[Problem, Choices] = {}
        self.parts: dict[Problem, int] = {}
        # Bytes that a call was seen to need beyond its chunks, and the error that showed it.
        self._surplus: dict[Problem, int] = {}
        self._refusals: dict[Problem, PlanError] = {}
        self._learned: dict[Problem, PlanError] = {}

    def divide(self) -> None:
        """Find each kernel's part of the pool, in bytes per call.

        A kernel may need more measurements within its part, and these may make another division
        better. With the same cache, a second run begins with the final division.
        """
        # At first every call owns what torch's own convolution needs, where the pool holds that: so
        # whoever interrupts tuning gets a plan within the pool.
        self.parts = self.parts or self._parts_of_defaults()
        while True:
            before = self._session.measured
            for problems in self._shares.by_geometry():
                self._survey(problems)
            try:
                self.parts = divided(self._choices, self._total_bytes, self._config.solver)
            except PlanError:
                # Fronts are incomplete then, and torch's own convolutions keep the parts they had.
                if self._budget.is_over:
                    return
                # Otherwise more was measured in this pass, and the next may show splits that fit.
                if self._session.measured == before:
                    raise
                continue
            for problems in self._shares.by_geometry():
                self._measure(problems)
            # The same measurements divide the pool in the same way: it is final.
            if self._session.measured == before or self._budget.is_over:
                return

    def refuse(self, problem: Problem, error: PlanError) -> None:
        """Record that a kernel has no plan within its part."""
        self._refusals[problem] = error

    def learn(self) -> bool:
        """Record the workspace of calls beyond their chunks, if it exceeded their parts.

        Returns:
            True if there were such calls, so that the pool must be divided anew.

        Raises:
            PlanError: a kernel has no plan within its part for another reason.
        """
        for problem, error in self._refusals.items():
            one = self._choices[problem]
            # The front's first point is what the chunks of one call need, the error says what all
            # calls of the kernel do.
            surplus = (error.smallest_bytes or 0) // one.calls - one.front[0].workspace_bytes
            # Nothing was learned by it, so that another division would fail in the same way.
            if surplus <= self._surplus.get(problem, 0):
                raise error
            self._surplus[problem], self._learned[problem] = surplus, error
        is_news = bool(self._refusals)
        self._refusals.clear()
        return is_news

    def _parts_of_defaults(self) -> dict[Problem, int]:
        """Workspace of torch's own convolutions, where the pool holds all of them."""
        needs, calls = dict[Problem, int](), self._layers
        for problem, entry in self._shares.defaults.items():
            limit = self._limits.of(problem)
            most = self._total_bytes if limit is None else limit
            if entry.workspace_bytes is not None and entry.workspace_bytes <= most:
                needs[problem] = entry.workspace_bytes
        total = sum(size * len(calls[problem]) for problem, size in needs.items())
        return needs if total <= self._total_bytes else {}

    def _most(self, problem: Problem) -> int:
        """The largest part that a call of a kernel may own."""
        # All calls of a kernel have one plan.
        part = self._total_bytes // len(self._layers[problem])
        limit = self._limits.of(problem)
        return part if limit is None else min(limit, part)

    def _survey(self, problems: Sequence[Problem]) -> None:
        """Measure the front of time over workspace of each kernel."""
        for problem in problems:
            self._on_work(problem)
            # Autocast would cast the operands to another dtype than that of the problem.
            with torch.autocast("cpu", enabled=False):
                self._choices[problem] = self._choices_of(problem)

    def _choices_of(self, problem: Problem) -> Choices:
        calls, most = len(self._layers[problem]), self._most(problem)
        front = survey(partial(self._planner_of, problem), most)
        surplus = self._surplus.get(problem, 0)
        fitting = tuple(point for point in front if point.workspace_bytes + surplus <= most)
        if front and not fitting:
            raise self._learned[problem]
        return Choices(calls, most, fitting, surplus)

    def _measure(self, problems: Sequence[Problem]) -> None:
        """Measure kernels within the parts that they got."""
        planners = [self._planner_of(p, self.parts[p]) for p in problems if p in self.parts]
        with torch.autocast("cpu", enabled=False):
            measure(self._session, planners)
            for planner in planners:
                planner.evidence()
                planner.release()


def measure(session: Session, planners: Sequence[KernelPlanner]) -> None:
    """Let planners of kernels that share measurements measure until none wants any more."""
    # `sum`, because `any` would ask nobody behind the first one that has something to measure.
    while sum(planner.step() for planner in planners):
        pass
    session.flush()
