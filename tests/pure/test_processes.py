"""Locks and cached values in children of a process whose other threads were at work."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ucudnn.system.processes import ForkSafeLock, cached_property

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
InChild = Callable[[Callable[[], object]], None]


@contextmanager
def busy(work: Callable[[Callable[[], None]], object]) -> Iterator[None]:
    """Another thread is in the middle of some work, where that calls its argument."""
    middle, end = threading.Event(), threading.Event()

    def pause() -> None:
        middle.set()
        end.wait()

    thread = threading.Thread(target=work, args=[pause])
    thread.start()
    middle.wait()
    try:
        yield
    finally:
        end.set()
        thread.join()


def test_a_lock_that_another_thread_holds_is_free_in_a_child(in_child: InChild) -> None:
    renewed: list[int] = []
    lock = ForkSafeLock(lambda: renewed.append(1))

    def hold(pause: Callable[[], None]) -> None:
        with lock, lock:
            pause()

    def use() -> None:
        assert renewed == [1]
        with lock, lock:
            assert excludes_others(lock)
        assert not excludes_others(lock)

    with busy(hold):
        in_child(use)
        assert excludes_others(lock)
    assert not renewed
    assert not excludes_others(lock)


def test_renewed_as_in_a_child_it_is_free_and_what_it_guards_is_told() -> None:
    """As above, in this process, so that the lines of a child are seen to run."""
    renewed: list[int] = []
    waiting: list[threading.Thread] = []
    lock = ForkSafeLock(lambda: renewed.append(1))
    with lock:
        lock.renew()
        assert excludes_others(lock, waiting)
    assert not excludes_others(lock)
    # The thread that had to wait must have let go of this lock before another takes its place.
    for thread in waiting:
        thread.join()
    # as if another thread held it: that would release the new lock when it goes on, here
    lock._lock = threading.Lock()  # type: ignore[assignment]
    lock._lock.acquire()
    lock.renew()
    assert not excludes_others(lock)
    assert renewed == [1, 1]


def test_a_lock_that_the_forking_thread_holds_stays_held(in_child: InChild) -> None:
    lock = ForkSafeLock()

    def release() -> None:
        assert excludes_others(lock)
        lock.__exit__()
        assert not excludes_others(lock)

    with lock:
        in_child(release)
        assert excludes_others(lock)


def excludes_others(lock: ForkSafeLock, threads: list[threading.Thread] | None = None) -> bool:
    """True where another thread has to wait for the lock; that thread is added to a list."""
    entered = threading.Event()

    def enter() -> None:
        with lock:
            entered.set()

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    if threads is not None:
        threads.append(thread)
    return not entered.wait(0.2)


def test_a_child_computes_a_value_that_another_thread_is_computing(in_child: InChild) -> None:
    class Value:
        def __init__(self, pause: Callable[[], None]) -> None:
            self.pause = pause
            self.computed = 0

        @cached_property
        def answer(self) -> int:
            """The answer."""
            self.pause()
            self.computed += 1
            return 42

    def use() -> None:
        value = Value(lambda: None)
        assert [value.answer, value.answer, value.computed] == [42, 42, 1]

    with busy(lambda pause: Value(pause).answer):
        in_child(use)
    use()
    assert Value.answer.__doc__ == "The answer."


def test_every_lock_of_the_package_is_of_this_kind(package: Path) -> None:
    """Python's own, and what uses them, stay locked in a child."""
    locks = r"(R?Lock|Condition|\w*Semaphore|cached_property)\b"
    theirs = re.compile(rf"\b(threading|functools)(\.| import .*\b){locks}")
    for room in (package, package / "solvers", package / "cache"):
        for path in room.rglob("*.py"):
            assert path.name == "processes.py" or not theirs.search(path.read_text()), path
    assert theirs.search((package / "system" / "processes.py").read_text())
