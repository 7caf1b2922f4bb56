"""Output and exit status of every command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# See `main`; 130 is what shells report for a process that SIGINT (2) has ended: 128 + 2.
SAYS_NO, USAGE, ENVIRONMENT, INTERRUPTED = 1, 2, 3, 130
# A pipe has no width of its own: one that holds a table.
out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
err = Console(stderr=True)


class InterruptedCommandError(Exception):
    """Ctrl-C while measuring; typer would end silently on KeyboardInterrupt itself."""


def say(line: str) -> None:
    """Print a line without markup."""
    # Names of layers may hold brackets, which rich would take for markup. With `soft_wrap` the
    # terminal breaks lines, so that a sentence can be copied whole.
    out.print(line, highlight=False, markup=False, soft_wrap=True)


def say_error(line: str) -> None:
    """Print a line without markup, to stderr, where progress is shown."""
    err.print(f"ucudnn: {line}", highlight=False, markup=False, soft_wrap=True)


def fail(message: str, status: int) -> None:
    """End the command with one sentence."""
    err.print(f"ucudnn: {message}", style="red", highlight=False, markup=False, soft_wrap=True)
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
    err.print(f"ucudnn: warning: {message}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress() -> Iterator[tuple[Callable[[Any], None], dict[str, int]]]:
    """A progress bar on the terminal, and the counts of the last event."""
    # Kept for the summary, because the bar is gone when it is printed.
    counts = {"measured": 0, "reused": 0}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=None, counts="", left="")

        # The budget comes with every event and is told once.
        said: list[float] = []

        def on_progress(event: Any) -> None:
            if event.budget_s is not None and not said:
                said.append(event.budget_s)
                say_error(f"tuning for at most {event.budget_s:.0f} s")
            counts.update(measured=event.measured, reused=event.reused)
            bar.update(
                task,
                description=event.kernel,
                completed=event.done,
                total=event.total,
                counts=f"{event.measured} measured, {event.reused} from cache",
                left="" if event.seconds_left is None else f"{event.seconds_left:.0f} s left",
            )

        yield on_progress, counts
