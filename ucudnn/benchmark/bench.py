"""Measurements on a device: first runs of candidates, rounds of candidates or of whole calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

from torch import Tensor

from ucudnn.axis import AbstractAxis
from ucudnn.backends import AbstractBackend, Executable
from ucudnn.benchmark.accuracy import Check, Reference
from ucudnn.benchmark.failures import CANDIDATE_ERRORS, CandidateError, Failure, failure_of
from ucudnn.benchmark.protocol import FINALS, ChunkLoop, Protocol, Ring, Sampler, WholeLoop
from ucudnn.benchmark.rounds import Entrant, Result, run_rounds
from ucudnn.errors import UnsupportedError
from ucudnn.execution.execute import Call, bind
from ucudnn.measurement import Role
from ucudnn.problem import Problem
from ucudnn.split import DEFAULT_ALGORITHM, Split


class Arm(NamedTuple):
    """A candidate of a kernel in one role: a chunk size, an algorithm, the role of the chunk."""

    size: int
    algorithm: str
    role: Role

    @property
    def is_default(self) -> bool:
        """True for torch's own convolution."""
        return self.algorithm == DEFAULT_ALGORITHM


class Look(NamedTuple):
    """Result of the first run of a candidate."""

    # The most workspace, and the largest relative error (L2), of a chunk of this size. Slabs at the
    # ends of the rows and in between are considered.
    workspace_bytes: int
    error: float
    # Shortest time of the runs after the first one. For torch's own convolution on a CPU it is the
    # time of the first run if that run was long. None if the workspace exceeds the limit.
    time_ns: int | None


class How(NamedTuple):
    """Settings for timing chunks, and for timing whole calls that race each other."""

    chunks: Protocol = Protocol()
    wholes: Protocol = FINALS
    # The `time.monotonic` after which no more rounds of chunks, or of whole calls, begin.
    until: float = inf
    wholes_until: float = inf


THOROUGHLY = How()


class AbstractBench(ABC):
    """Measures the candidates of one kernel.

    Law: if a candidate fails, only this candidate is reported as failed, and all others are
    measured. `look` raises an error for a failure; the results of the other methods hold failures.
    """

    @abstractmethod
    def look(self, arm: Arm, limit: int | None, rival_ns: float = inf) -> Look:
        """Run a candidate for the first time, to find its workspace, its error and its time.

        If its workspace exceeds the limit in bytes, the candidate is not run again for its time. If
        its first timed run takes much longer than `rival_ns`, the time of its fastest rival, this
        run is not repeated. If it fails, a RuntimeError or MemoryError is raised, whose first line
        says why. An UnsupportedError means that this kernel cannot be measured at all.
        """

    @abstractmethod
    def rounds(
        self, arms: Sequence[Arm], known: Mapping[tuple[int, str], tuple[int, int]]
    ) -> list[Result]:
        """Time candidates in interleaved rounds; those of one size and role race each other.

        `known` has, by size and role, the time of a rival that was timed before: its median, and
        the upper end of its interval.
        """

    @abstractmethod
    def whole(self, splits: Sequence[Split], has_bias: bool = False) -> list[Result]:
        """Time whole calls, each of them in every round; with `has_bias` they also add a bias."""


class LocalBench(AbstractBench):
    """Measures in this process; `on_turn` gets the index of an arm or split before each run."""

    def __init__(
        self,
        backend: AbstractBackend,
        axis: AbstractAxis,
        on_turn: Callable[[int], None] = lambda _: None,
        how: How = THOROUGHLY,
    ) -> None:
        self._backend = backend
        self._axis = axis
        self._on_turn = on_turn
        self._how = how
        self._ring: Ring | None = None
        self._lack: Failure | None = None
        self._samplers: dict[Arm, Sampler] = {}
        self._executables: dict[tuple[Problem, str], Executable] = {}
        self._references: dict[Problem, Reference] = {}

    @property
    def ring(self) -> Ring:
        """The operands of all candidates, allocated before the first run."""
        # Without memory for the operands every candidate fails alike. To try again takes as long as
        # to time a candidate.
        if self._lack is not None:
            raise CandidateError(self._lack.reason, self._lack.kind)
        if self._ring is None:
            try:
                self._ring = Ring.allocate(self._backend, self._axis.problem)
            except CANDIDATE_ERRORS as error:
                self._lack = failure_of(error)
                raise
        return self._ring

    def look(self, arm: Arm, limit: int | None, rival_ns: float = inf) -> Look:
        """Run a candidate for the first time, to find its workspace, its error and its time."""
        # The operands are allocated outside of `try`, because that a backend has none is no failure
        # of the candidate.
        ring = self.ring
        try:
            return self._look(ring, arm, limit, rival_ns)
        # Some backends find out that a candidate cannot run only when they build it.
        except UnsupportedError as error:
            raise RuntimeError(str(error)) from error

    def _look(self, ring: Ring, arm: Arm, limit: int | None, rival_ns: float) -> Look:
        error, workspace = 0.0, 0
        firsts_ns = list[int]()
        # Slabs at both ends are run, too, because their padding may take workspace or be handled
        # wrongly.
        for part in (self._axis.part(arm.size), *self._axis.ends(arm.size)):
            reference = self._reference(ring, part)
            check, part_workspace = self._checked(ring, part, arm.algorithm, arm.role, firsts_ns)
            error = max(error, check.error(reference))
            workspace = max(workspace, part_workspace)
        # No plan within this limit can use the candidate, so it is not timed until the limit is
        # raised.
        if limit is not None and workspace > limit:
            return Look(workspace, error, None)
        # The time of the first run is used only for torch's own convolution on a CPU. On a GPU the
        # first run also loads kernels; with other algorithms it also fills memory with NaN.
        is_plain = arm.is_default and self._backend.device().type == "cpu"
        first_ns = firsts_ns[0] if firsts_ns and is_plain else 0
        return Look(workspace, error, self._sampler(arm).shortest_ns(first_ns, rival_ns))

    def _reference(self, ring: Ring, part: Problem) -> Reference:
        """Float64 values of a part's result, computed once for all algorithms and roles."""
        if part not in self._references:
            # These are the operands on which `Check.run` runs the candidate.
            self._references[part] = Reference(part, *ring.operands(part, 0))
        return self._references[part]

    def _checked(
        self, ring: Ring, part: Problem, algorithm: str, role: Role, times_ns: list[int]
    ) -> tuple[Check, int]:
        """A check of a candidate that has run once on a part, and its workspace in bytes.

        The time of the run is appended to `times_ns`.
        """
        executable = self._executable(part, algorithm)
        check = Check(ring, executable, part, role, algorithm == DEFAULT_ALGORITHM)

        def run() -> Tensor | None:
            results = list[Tensor | None]()
            times_ns.append(self._backend.elapsed_ns(lambda: results.append(check.run())))
            return results[0]

        return check, self._backend.workspace_bytes(run, [(part, algorithm)])

    def rounds(
        self, arms: Sequence[Arm], known: Mapping[tuple[int, str], tuple[int, int]]
    ) -> list[Result]:
        """Time candidates in interleaved rounds; those of one size and role race each other."""

        def enter(arm: Arm) -> Entrant:
            sampler = self._sampler(arm)
            sampler.warm_up(self._how.chunks)
            return Entrant(sampler.sample_ns, (arm.size, arm.role))

        entering = [partial(enter, arm) for arm in arms]
        return self._raced(entering, self._how.chunks, self._how.until, known)

    def _raced(
        self,
        entering: Sequence[Callable[[], Entrant]],
        protocol: Protocol,
        until: float,
        known: Mapping[tuple[int, str], tuple[int, int]] | None = None,
    ) -> list[Result]:
        """The result of each entrant: its rounds, or the reason why it could not take part."""
        entrants: dict[int, Entrant] = {}
        results = [Result() for _ in entering]
        for place, enter in enumerate(entering):
            self._on_turn(place)
            try:
                entrants[place] = enter()
            # An entrant that fails leaves the race, and the others are timed. But if the device is
            # broken, as after a fault on a GPU, all others would fail as well, so the error is
            # raised.
            except (*CANDIDATE_ERRORS, UnsupportedError) as error:
                if self._backend.is_broken():
                    raise
                results[place] = Result(failure=failure_of(error))
        places = list(entrants)
        found = run_rounds(
            self._backend,
            list(entrants.values()),
            protocol,
            known,
            lambda number: self._on_turn(places[number]),
            until,
        )
        for place, result in zip(places, found, strict=True):
            results[place] = result
        return results

    def _sampler(self, arm: Arm) -> Sampler:
        # There is no sampler yet if the first run of the candidate was in another process, or in an
        # earlier tune.
        if arm not in self._samplers:
            part = self._axis.part(arm.size)
            executable = self._executable(part, arm.algorithm)
            loop = ChunkLoop(self.ring, executable, part, arm.role)
            self._samplers[arm] = Sampler(loop, self._backend)
        return self._samplers[arm]

    def _executable(self, part: Problem, algorithm: str) -> Executable:
        """The executable of an algorithm, which is checked and timed in all roles."""
        key = part, algorithm
        if key not in self._executables:
            self._executables[key] = self._backend.executable(part, algorithm)
        return self._executables[key]

    def whole(self, splits: Sequence[Split], has_bias: bool = False) -> list[Result]:
        """Time whole calls, each of them in every round; with `has_bias` they also add a bias."""
        workspaces = [0] * len(splits)

        def enter(place: int) -> Entrant:
            ring, call = self.ring, bind(self._backend, self._axis.problem, splits[place])
            loop = WholeLoop(ring, call, ring.bias() if has_bias else None)
            sampler = Sampler(loop, self._backend)
            # This is the first run of the call. If it fails, the call takes no part in the race.
            workspaces[place] = self._workspace_of(loop, call)
            sampler.warm_up(self._how.wholes)
            return Entrant(sampler.sample_ns)

        entering = [partial(enter, place) for place in range(len(splits))]
        results = self._raced(entering, self._how.wholes, self._how.wholes_until)
        for result, workspace in zip(results, workspaces, strict=True):
            result.workspace_bytes = workspace
        return results

    def _workspace_of(self, loop: WholeLoop, call: Call) -> int:
        """Workspace of a call in bytes.

        A backend may not see memory that a library allocates inside an algorithm. Then it adds the
        most that any chunk's algorithm so allocates to the peak of the whole call, which another
        chunk may have caused. So if the chunks have different algorithms, each chunk is also
        measured by itself.
        """
        together = self._backend.workspace_bytes(loop.once, call.parts)
        parts = dict.fromkeys(call.parts)
        # A weight gradient also holds the sum of its chunks, which no single chunk counts as its
        # workspace.
        if call.problem.op == "wgrad" or len({algorithm for _, algorithm in parts}) == 1:
            return together
        each = (
            self._checked(self.ring, part, algorithm, Role.LATER, [])[1]
            for part, algorithm in parts
        )
        return min(together, max(each))
