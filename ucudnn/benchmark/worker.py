"""Measure in a child process; if a candidate hangs or kills that process, a new one is started.

The child is a new interpreter that imports this module. It is not forked, because a GPU context
does not survive a fork. Nor does multiprocessing start it by "spawn", which would run the user's
script a second time if that has no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from multiprocessing.connection import Connection, Pipe
from time import monotonic
from typing import Any

import torch

from ucudnn.axis import AbstractAxis
from ucudnn.backends import AbstractBackend
from ucudnn.benchmark.bench import THOROUGHLY, AbstractBench, Arm, How, LocalBench, Look
from ucudnn.benchmark.failures import CANDIDATE_ERRORS, CandidateError, LostError, failure_of
from ucudnn.benchmark.rounds import Result
from ucudnn.config import environment_without_startup
from ucudnn.errors import UcudnnError
from ucudnn.measurement import FailureKind
from ucudnn.split import Split
from ucudnn.system.processes import start_python

_PROGRAM = "import sys; from ucudnn.benchmark.worker import serve; serve(int(sys.argv[1]))"
# The first answer of a child may take this many seconds, because the child first imports modules
# and, on a GPU, creates a context.
_START_S = 120.0


class Worker:
    """A child process that measures on one device; if it is lost, a new one is started.

    The first request starts the child, because many tunings need none. Use a worker as a context,
    which ends the child.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_resting = False
        self.started_s = 0.0  # seconds that starting children took

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(
        self, backend: AbstractBackend, axis: AbstractAxis, how: How, method: str, *arguments: Any
    ) -> Any:
        """Call a method of a `LocalBench` of this axis in the child.

        All requests to a worker are for the same device. Raises LostError if the child hung or
        ended; the next call then starts another child.
        """
        request, answer = (axis, how, method, arguments), None
        try:
            connection = self._started(backend)
            try:
                connection.send(request)
            # The child ended between two requests, which is no failure of a candidate. So a new
            # child is asked.
            except OSError:
                self.close()
                connection = self._started(backend)
                connection.send(request)
            answer = self._answer(connection, backend.candidate_timeout_s)
        finally:
            # Whatever ended this, the child is busy, and its answer would be taken for that to the
            # next request.
            if answer is None:
                self.close()
        kind, value = answer
        if kind == "raised":
            raise value
        return value

    def _answer(self, connection: Connection, patience_s: float) -> tuple[str, Any]:
        turn = 0
        while True:
            try:
                # `patience_s` counts from the last message of the child, which sends one before
                # each sample of a race.
                if not connection.poll(patience_s):
                    self.close()
                    raise LostError(
                        f"it did not end within {patience_s:g} s", FailureKind.HANG, turn
                    )
                kind, value = connection.recv()
            except (EOFError, OSError):
                raise LostError(self._how_it_ended(), FailureKind.CRASH, turn) from None
            if kind == "turn":
                turn = value
            elif kind == "lost":
                self.close()
                raise LostError(value, FailureKind.CRASH, turn)
            else:
                return kind, value

    def rest(self) -> None:
        """Let the child free its operands, because this process needs the memory meanwhile."""
        if self._connection is None or self._is_resting:
            return
        self._is_resting, rests = True, False
        try:
            self._connection.send(None)
            if self._connection.poll(_START_S):
                self._connection.recv()
                rests = True
        except (EOFError, OSError):
            pass
        finally:
            if not rests:
                self.close()

    def close(self) -> None:
        """End the child, even if it is busy."""
        if self._child is not None:
            # This sends SIGKILL, which no library in the child can catch or delay.
            self._child.kill()
            self._child.wait()
        if self._connection is not None:
            self._connection.close()
        self._child = self._connection = None

    def _started(self, backend: AbstractBackend) -> Connection:
        """The connection to the child, which is started, or has opened the backend after a rest."""
        if self._connection is not None and not self._is_resting:
            return self._connection
        began, is_new = monotonic(), self._connection is None
        # Give back the memory that torch's allocator keeps in this process without using it: the
        # child needs it.
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        connection = self._connection or self._start()
        try:
            # After a rest the backend is sent anew, because it says how much memory is left to the
            # child.
            connection.send((backend, torch.get_num_threads()))
            if not connection.poll(_START_S):
                self.close()
                raise UcudnnError(f"a process to measure in did not start within {_START_S:g} s")
            connection.recv()
        except (EOFError, OSError):
            how = self._how_it_ended()
            if not is_new:
                return self._started(backend)
            raise UcudnnError(f"a process to measure in could not start: {how}") from None
        self._is_resting = False
        self.started_s += monotonic() - began
        return connection

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        self._child = start_python(
            _PROGRAM,
            str(theirs.fileno()),
            environment=environment_without_startup(),
            # What libraries print in the child must not appear in the output of the user's program.
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        # After this the only other end of the pipe is in the child, so the pipe shows when the
        # child has ended.
        theirs.close()
        self._connection = ours
        return ours

    def _how_it_ended(self) -> str:
        assert self._child is not None
        status = self._child.wait()
        self.close()
        if status < 0:
            return f"it ended its process by {signal.Signals(-status).name}"
        return f"it ended its process with exit status {status}"


class WorkerBench(AbstractBench):
    """Measures one kernel in a worker's process."""

    def __init__(
        self, worker: Worker, backend: AbstractBackend, axis: AbstractAxis, how: How = THOROUGHLY
    ) -> None:
        self._ask = partial(worker.ask, backend, axis, how)

    def look(self, arm: Arm, limit: int | None, rival_ns: float = inf) -> Look:
        """Run a candidate for the first time, to find its workspace, its error and its time."""
        found = self._ask("look", arm, limit, rival_ns)
        assert isinstance(found, Look)
        return found

    def rounds(
        self, arms: Sequence[Arm], known: Mapping[tuple[int, str], tuple[int, int]]
    ) -> list[Result]:
        """Time candidates in interleaved rounds; if one ends the worker, start over without it."""
        return self._without_the_lost("rounds", list(arms), dict(known))

    def whole(self, splits: Sequence[Split], has_bias: bool = False) -> list[Result]:
        """Time whole calls, each of them in every round; with `has_bias` they also add a bias."""
        return self._without_the_lost("whole", list(splits), has_bias)

    def _without_the_lost(self, method: str, asked: list[Any], *more: Any) -> list[Result]:
        """For each of `asked` the result of the method, or how that candidate was lost."""
        results = [Result() for _ in asked]
        left = list(range(len(asked)))
        while left:
            try:
                # Samples of one round are compared as pairs. So if a candidate is lost, the others
                # start over without it.
                still = [asked[place] for place in left]
                answers = self._ask(method, still, *more)
            except LostError as lost:
                results[left.pop(lost.turn)].failure = failure_of(lost)
            else:
                for place, answer in zip(left, answers, strict=True):
                    results[place] = answer
                break
        return results


def serve(descriptor: int) -> None:
    """Answer the requests of a `Worker` until the worker ends; this runs in the child."""
    # A terminal sends Ctrl-C to the child as well; the parent handles it and ends the child.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Connection(descriptor) as connection, torch.no_grad():
        while True:
            try:
                backend, threads = connection.recv()
                torch.set_num_threads(threads)
                connection.send(("ready", None))
                _serve_until_rest(connection, backend)
            except EOFError:
                return
            # All that the bench held is free now.
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            connection.send(("rests", None))


def _serve_until_rest(connection: Connection, backend: AbstractBackend) -> None:
    measured: tuple[AbstractAxis, How] | None = None
    while (request := connection.recv()) is not None:
        axis, how, method, arguments = request
        # A bench holds the operands of a kernel. It is kept for all requests for this kernel.
        if (axis, how) != measured:
            bench = LocalBench(backend, axis, lambda turn: connection.send(("turn", turn)), how)
            measured = axis, how
        try:
            answer = ("done", getattr(bench, method)(*arguments))
        except (*CANDIDATE_ERRORS, UcudnnError) as error:
            if backend.is_broken():
                answer = ("lost", failure_of(error).reason)
            elif isinstance(error, UcudnnError):
                answer = ("raised", error)
            # Errors of other classes are sent as `CandidateError`, because their class may not be
            # importable in the parent.
            else:
                kind, reason = failure_of(error)
                answer = ("raised", CandidateError(reason, kind))
        connection.send(answer)
