"""Output and exit status of every command."""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ucudnn.system.markup import printable
from ucudnn.units import format_ns

# See `main`; 130 is what shells report for a process that SIGINT (2) has ended: 128 + 2.
SAYS_NO, USAGE, ENVIRONMENT, CRASHED, INTERRUPTED = 1, 2, 3, 4, 130
# What is printed may hold names of the user, in which rich must not see markup, emoji or numbers.
_PLAIN: dict[str, Any] = {"emoji": False, "markup": False, "highlight": False}


def _width() -> int | None:
    """Characters in a line of results; None: as rich finds, which asks COLUMNS and the terminal."""
    if "COLUMNS" in os.environ or sys.stdout.isatty():
        return None
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError):  # replaced by something that is no file
        is_pipe = False
    # What goes through `head` or `less` is read on the terminal; a file has no width of its own.
    return None if is_pipe and sys.stderr.isatty() else 160


class _Printer(Console):
    """Prints names as they are written, whatever terminals would do with their characters."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Called for everything that is printed, cells of tables included."""
        lines = "\n".join(map(printable, text.split("\n")))
        return super().render_str(lines, **options)


out = _Printer(width=_width(), **_PLAIN)
err = _Printer(stderr=True, **_PLAIN)
# Seconds between two lines of progress where there is no terminal; CI systems end jobs that are
# silent for minutes.
_LINE_S = 10.0
# -1: only results, warnings and errors; 0: progress, too; 1 and 2: what the package logs.
_verbosity = 0


class InterruptedCommandError(Exception):
    """Ctrl-C while measuring; typer would end silently on KeyboardInterrupt itself."""


def set_verbosity(level: int) -> None:
    """Print less than usual (-1), as usual (0), what the package logs (1), or also details (2)."""
    global _verbosity  # noqa: PLW0603 - one process runs one command
    _verbosity = level
    logger = logging.getLogger("ucudnn")
    logger.handlers = [one for one in logger.handlers if not isinstance(one, _LogHandler)]
    if level > 0:
        logger.addHandler(_LogHandler())
        logger.setLevel(logging.INFO if level == 1 else logging.DEBUG)


class _LogHandler(logging.Handler):
    """Prints what the package logs where progress is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        say_error(record.getMessage())


def say(line: str) -> None:
    """Print a line without markup."""
    # With `soft_wrap` the terminal breaks lines, so that a sentence can be copied whole.
    out.print(printable(line), soft_wrap=True)


def print_json(document: object) -> None:
    """Print a document on one line, which rich would break."""
    print(json.dumps(document))


def say_error(line: str) -> None:
    """Print a line without markup, to stderr, where progress is shown."""
    err.print(f"ucudnn: {line}", soft_wrap=True)


# Settings in messages of the package, as they are called on a command line.
_FLAGS = {
    "real=True": "--real",
    "unplanned='torch'": "--unplanned torch",
    "unplanned='error'": "--unplanned error",
    "backend='recorded'": "--backend recorded",
    "backend='cudnn'": "--backend cudnn",
    "or time_budget_s": "or --time-budget",
    "larger time_budget_s": "larger --time-budget",
}


def as_flags(message: str) -> str:
    """A message with flags in the place of Python's keyword arguments.

    >>> as_flags("if it needs values, use real=True")
    'if it needs values, use --real'
    """
    for setting, flag in _FLAGS.items():
        message = message.replace(setting, flag)
    return message


def fail(message: str, status: int) -> None:
    """End the command with one sentence."""
    err.print(f"ucudnn: {as_flags(message)}", style="red", soft_wrap=True)
    sys.exit(status)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print the sentence of a warning alone; called as `warnings.showwarning` is."""
    del category, filename, lineno, file, line
    say_error(f"warning: {as_flags(str(message))}")


class Update(Protocol):
    """Shows how far a command is."""

    def __call__(self, done: int, total: int | None, what: str = "", left: str = "") -> None:
        """Show that so many parts are done, what is at work, and what else is known."""
        ...


@contextmanager
def bar(title: str) -> Iterator[Update]:
    """A progress bar on a terminal; elsewhere a line now and then."""
    if _verbosity < 0:
        yield _silent
    elif err.is_terminal:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=err, transient=True) as shown:
            task = shown.add_task(title, total=None, left="")

            def update(done: int, total: int | None, what: str = "", left: str = "") -> None:
                shown.update(
                    task, description=what or title, completed=done, total=total, left=left
                )

            yield update
    else:
        yield _Lines(title)


def _silent(done: int, total: int | None, what: str = "", left: str = "") -> None:
    del done, total, what, left


class _Lines:
    """Progress as lines, each some seconds after the one before."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._next = time.monotonic() + _LINE_S

    def __call__(self, done: int, total: int | None, what: str = "", left: str = "") -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LINE_S
        parts = [self._title, f"{done} of {total}" if total else "", what, left]
        say_error(", ".join(part for part in parts if part))


@contextmanager
def progress() -> Iterator[tuple[Callable[[Any], None], dict[str, int]]]:
    """Progress of tuning, and the counts of the last event."""
    # Kept for the summary, because the bar is gone when it is printed.
    counts = {"measured": 0, "reused": 0}
    with bar("tuning") as update:
        # The budget comes with every event and is told once.
        said: list[float] = []

        def on_progress(event: Any) -> None:
            if event.budget_s is not None and not said:
                said.append(event.budget_s)
                if _verbosity >= 0:
                    say_error(f"tuning for at most {event.budget_s:.0f} s")
            counts.update(measured=event.measured, reused=event.reused)
            left = f"{event.measured} measured, {event.reused} from cache"
            if event.division_ns is not None:
                left += f", best division so far {format_ns(event.division_ns)}"
            if event.seconds_left is not None:
                left += f", {event.seconds_left:.0f} s left"
            update(event.done, event.total, event.kernel, left)

        yield on_progress, counts
