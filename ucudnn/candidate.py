"""One way to compute one problem: an algorithm at a micro-batch size, with what is known unrun."""

from __future__ import annotations

from dataclasses import dataclass

from ucudnn.problem import Problem

# Note of a candidate that also adds a bias, in the kernel that computes the convolution.
ADDS_BIAS = "adds bias"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A problem at a micro-batch size together with an algorithm that can compute it.

    >>> c = Candidate(Problem("fprop", 8, 4, 4, (9, 9), (1, 1)), "gemm")
    >>> c.problem.batch, c.workspace_bytes
    (8, None)

    Args:
        problem: the problem at the micro-batch size.
        algorithm: the algorithm's stable name.
        workspace_bytes: temporary memory in bytes, None where only a run can tell.
        notes: facts such as "nondeterministic" or "kernel=onednn".
    """

    problem: Problem
    algorithm: str
    workspace_bytes: int | None = None
    notes: tuple[str, ...] = ()
