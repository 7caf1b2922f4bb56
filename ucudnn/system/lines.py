"""Progress where there is no terminal: a line from time to time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Seconds between two lines. CI systems end jobs that are silent for minutes.
_LINE_S = 10.0


@contextmanager
def lines(title: str, say: Callable[[str], None]) -> Iterator[Callable[..., None]]:
    """Show progress as a line every ten seconds, also while nothing is reported.

    >>> with lines("tuning", print) as update:
    ...     update(1, 2, "conv1", "3 s left")  # ends before there is a line

    Yields a function to call whenever a part is done. It takes the number of parts that are done,
    the number of all parts (None if not known), and two texts, which may be left out: what runs at
    the moment, and what is left to do.

    Args:
        title: what goes on.
        say: prints a line; it is called in a thread of its own.
    """
    parts: tuple[str, ...] = ()
    ended, began = threading.Event(), time.monotonic()

    def update(done: int, total: int | None, what: str = "", left: str = "") -> None:
        nonlocal parts
        parts = f"{done} of {total}" if total else "", what, left

    def run() -> None:
        while not ended.wait(_LINE_S):
            passed = f"{time.monotonic() - began:.0f} s"
            say(", ".join(filter(None, [title, passed, *parts])))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield update
    finally:
        ended.set()
        thread.join()
