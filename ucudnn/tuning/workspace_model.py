"""Workspace of the chunks of one kernel: known, or expected before they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from ucudnn.problem import Problem
from ucudnn.system.forking import cached_property
from ucudnn.tuning.items import held_bytes

if TYPE_CHECKING:
    from ucudnn.benchmark.bench import Arm
    from ucudnn.measurement import Measurement
    from ucudnn.tuning.candidates import KernelCandidates

# Upper bound of workspace over operands and result; im2col with an 11x11 filter needs 121 times.
_MOST_COPIES = 128
# Without a workspace limit a candidate may take this many times its operands and result, or so many
# bytes: more would raise the peak of a step, and of tuning, far above what the model needs.
_MOST_OPERANDS = 4
_SMALL_BYTES = 128 << 20


class WorkspaceModel:
    """Known and extrapolated workspace of a kernel's chunks.

    For each implementation, workspace is assumed to grow linearly with the chunk.

    Args:
        candidates: of the kernel.
        records: measurements so far, by arm; their owner adds to them.
        limit: workspace in bytes that a chunk may use, None for any.
        available_bytes: memory that a benchmark may use on this machine.
    """

    def __init__(
        self,
        candidates: KernelCandidates,
        records: Mapping[Arm, Measurement],
        limit: int | None,
        available_bytes: int,
    ) -> None:
        self._candidates = candidates
        self._records = records
        self.limit = limit
        self._available_bytes = available_bytes
        self._must_be_known = must_be_known(candidates.problem, limit, available_bytes)

    @cached_property
    def most_bytes(self) -> int:
        """Largest workspace that a candidate may take on this machine, apart from the limit."""
        if self.limit is not None:
            return self._available_bytes
        whole = _operand_bytes(self._candidates.problem)
        return min(self._available_bytes, max(_SMALL_BYTES, _MOST_OPERANDS * whole))

    def fits(self, arm: Arm, workspace: int) -> bool:
        """True if this number of bytes of workspace is within the limit."""
        held = workspace + held_bytes(self._candidates.problem, arm.role)
        return self.limit is None or held <= self.limit

    def may_fit(self, arm: Arm) -> bool:
        """False if the lower bound that the algorithm states is too large."""
        cost = self._candidates.cost(arm.size, arm.algorithm)
        return cost is None or self.may_run(arm, cost.workspace_bytes)

    def may_run(self, arm: Arm, workspace: int) -> bool:
        """True if this number of bytes is within the limit and within the machine's memory."""
        return self.fits(arm, workspace) and workspace <= self.most_bytes

    def can_be_run(self, arm: Arm) -> bool:
        """True for an arm that never ran and is expected to fit."""
        workspace = self.expected(arm)
        return arm not in self._records and workspace is not None and self.may_run(arm, workspace)

    def known(self, arm: Arm) -> int | None:
        """Workspace of an arm in bytes, as measured or as stated by the backend."""
        entry = self._records.get(arm)
        if entry is not None and entry.workspace_bytes is not None:
            return entry.workspace_bytes
        return self._candidates.by_arm[arm].workspace_bytes

    def expected(self, arm: Arm) -> int | None:
        """Workspace of an arm in bytes, known or extrapolated; None if it cannot be told."""
        known = self.known(arm)
        if known is not None:
            return known
        points = [  # a larger chunk that does not fit says nothing of a smaller one
            (size, workspace)
            for size, workspace in self._points(arm)
            if size <= arm.size or self.fits(arm, workspace)
        ]
        if not points:
            # Where any workspace would fit the memory, nothing need be known before a chunk is run.
            return None if self._must_be_known else 0
        return _on_the_line(points, arm.size, self._candidates.sizes)

    def _points(self, arm: Arm) -> list[tuple[int, int]]:
        """Known sizes and workspaces of a curve, in the arm's role or else in another one."""
        curves = self._candidates.curves
        known = [
            (other, entry.workspace_bytes)
            for other, entry in self._records.items()
            if entry.workspace_bytes is not None and curves.get(other) == curves[arm]
        ]
        same = sorted((other.size, found) for other, found in known if other.role == arm.role)
        if same:
            return same
        # a chunk that was only run as a later one is expected to need less alone: not its result
        others = sorted(
            (other.size, max(0, workspace - self._own_result(other.size)))
            for other, workspace in known
        )
        return list(dict(others).items())  # of two roles the one that needs more

    def _own_result(self, size: int) -> int:
        candidates = self._candidates
        if candidates.problem.op == "wgrad":
            return 0
        return candidates.axis.part(size).result_bytes


def must_be_known(problem: Problem, limit: int | None, available_bytes: int) -> bool:
    """True if the workspace of a large chunk must be known before it may run.

    >>> must_be_known(Problem("fprop", 1, 1, 1, (9,), (3,)), None, 1 << 30)
    False
    """
    return limit is not None or _MOST_COPIES * _operand_bytes(problem) > available_bytes


def _operand_bytes(problem: Problem) -> int:
    elements = sum(map(prod, (*problem.operand_shapes, problem.result_shape)))
    return elements * problem.bytes_per_element


def _on_the_line(points: Sequence[tuple[int, int]], size: int, sizes: Sequence[int]) -> int:
    """Workspace of a size: that of the next larger known one, else extrapolated on a line."""
    for known, workspace in points:
        if known >= size:
            return workspace
    known, workspace = points[-1]
    if len(points) > 1:
        less_size, less = points[-2]
        return workspace + max(0, workspace - less) * (size - known) // (known - less_size)
    if size == sizes[sizes.index(known) + 1]:  # it takes two for a line
        return workspace
    return workspace * size // known
