"""Child processes that run this package; locks and properties that survive a fork.

Processes that use this package may fork, as PyTorch's DataLoader does. A child of `os.fork` has one
thread, the one that forked, and a copy of every lock. A lock that another thread of the parent held
at that moment would never be released in the child.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from threading import RLock
from typing import Any, TypeVar
from weakref import WeakSet

_Value = TypeVar("_Value")


def start_python(
    program: str, *arguments: str, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start Python code in a child process, which finds the same packages as this process.

    >>> child = start_python("import ucudnn; print(ucudnn.__name__)", stdout=subprocess.PIPE)
    >>> child.communicate()[0].strip()
    b'ucudnn'

    `options` are passed to `subprocess.Popen`. Without an `environment`, the child gets the
    variables of this process.
    """
    # The child gets `sys.path` with all changes that this process has made. An empty entry means
    # the current folder.
    paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(  # noqa: S603 - our own interpreter
        # Without -P, `-c` would put the current folder first in sys.path.
        [sys.executable, "-P", "-c", program, *arguments],
        env={**(os.environ if environment is None else environment), "PYTHONPATH": paths},
        **options,
    )


class ForkSafeLock:
    """A reentrant lock that is free in a forked child, unless the thread that forked holds it.

    >>> with (lock := ForkSafeLock()), lock:
    ...     print("held twice")
    held twice

    `in_child` is called at the start of every forked child. It may repair the data that the lock
    guards, because the fork may have happened in the middle of a change of the data.
    """

    def __init__(self, in_child: Callable[[], object] = lambda: None) -> None:
        self._lock = RLock()
        self._in_child = in_child
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Free the lock in a forked child, unless the child's only thread holds it."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        # Another thread of the parent held the lock. That thread does not exist in this process and
        # would never release the lock, so the lock is replaced.
        else:
            self._lock = RLock()
        self._in_child()


class cached_property(functools.cached_property[_Value]):  # noqa: N801 - named as in functools
    """Like functools.cached_property of Python 3.12 and later, which takes no lock.

    functools.cached_property of Python 3.11 computes values under a lock that all instances share.
    If a fork copies the lock while it is held, no one releases it in the child.

    >>> class Circle:
    ...     radius = 2
    ...
    ...     @cached_property
    ...     def area(self) -> float:
    ...         return 3 * self.radius**2
    >>> Circle().area
    12
    """

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        super().__init__(compute)
        self.lock = nullcontext()  # the lock of Python 3.11


def _renew_all() -> None:
    for lock in _locks:
        lock.renew()


# The references to locks are weak, because the hook below stays registered until the process ends,
# and must not keep locks alive that long.
_locks: WeakSet[ForkSafeLock] = WeakSet()
os.register_at_fork(after_in_child=_renew_all)
