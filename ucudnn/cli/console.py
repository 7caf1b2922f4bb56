"""Output and exit status of every command."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ucudnn.system.lines import lines
from ucudnn.system.markup import printable

# Exit statuses, described in `main`. Shells report 130 = 128 + 2 for a process ended by SIGINT (2).
SAYS_NO, USAGE, ENVIRONMENT, CRASHED, INTERRUPTED = 1, 2, 3, 4, 130
# Printed text may contain names that the user chose. In these, rich must not interpret markup or
# emoji, or highlight numbers.
_PLAIN: dict[str, Any] = {"emoji": False, "markup": False, "highlight": False}


def _width() -> int | None:
    """Characters in a line of results; None: rich decides by COLUMNS or the terminal."""
    # Rich takes the width of the terminal from stdin, stdout or stderr. One of them is enough: if
    # stdout is a pipe to a program such as `less`, that program shows the output on the terminal.
    # In CI, where none of the three is a terminal, lines have a fixed width.
    is_seen = "COLUMNS" in os.environ or any(map(os.isatty, range(3)))
    return None if is_seen else 160


class _Printer(Console):
    """Prints control characters in names as escapes, so that no terminal obeys them."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape control characters; rich calls this for all that it prints, tables included."""
        lines = "\n".join(map(printable, text.split("\n")))
        return super().render_str(lines, **options)


out = _Printer(width=_width(), **_PLAIN)
err = _Printer(stderr=True, **_PLAIN)
# True if no progress is shown, but only results, warnings and errors.
_is_quiet = False


class InterruptedCommandError(Exception):
    """Raised after Ctrl-C while measuring, because typer ends silently on a KeyboardInterrupt."""


def set_quiet(is_quiet: bool) -> None:
    """Set whether progress is left out."""
    global _is_quiet  # noqa: PLW0603 - one process runs one command
    _is_quiet = is_quiet


def say(line: str) -> None:
    """Print a line without markup."""
    # With `soft_wrap` the terminal breaks lines, so that a sentence can be copied whole.
    out.print(printable(line), soft_wrap=True)


def print_json(document: object) -> None:
    """Print a document as one line of JSON; rich is not used, because it would break the line."""
    print(json.dumps(document))


class Answer(NamedTuple):
    """What a command has found, for machines and for people.

    Attributes:
        document: JSON values, which are printed with --json.
        lines: sentences and tables, which are printed without --json.
        refusal: None if the command succeeds. Otherwise its exit status is 1, and this is a
            sentence for stderr, or "" if the lines say it all.
    """

    document: object
    lines: Iterable[str | Table]
    refusal: str | None = None

    def tell(self, as_json: bool) -> None:
        """Print the answer, and end the command if it is a refusal."""
        if as_json:
            print_json(self.document)
        else:
            print_lines(self.lines)
        if self.refusal:
            fail(self.refusal, SAYS_NO)
        if self.refusal is not None:
            sys.exit(SAYS_NO)


def print_lines(lines: Iterable[str | Table]) -> None:
    """Print sentences and tables."""
    for line in lines:
        say(line) if isinstance(line, str) else out.print(line)


def say_error(line: str) -> None:
    """Print a line without markup, to stderr, where progress is shown."""
    err.print(f"ucudnn: {line}", soft_wrap=True)


# Settings as they are written in messages of the package, each with the flag to print instead.
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
    """Print one sentence and end the command with an exit status."""
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
    """Print only the sentence of a warning; the parameters are those of `warnings.showwarning`."""
    del category, filename, lineno, file, line
    say_error(f"warning: {as_flags(str(message))}")


@contextmanager
def bar(title: str) -> Iterator[Callable[..., None]]:
    """Show progress: on a terminal as a bar, elsewhere as a line from time to time.

    Yields a function to call whenever a part is done. It takes the number of parts that are done,
    the number of all parts (None if not known), and two texts, which may be left out: what runs at
    the moment, and what is left to do.
    """
    if _is_quiet:
        yield lambda *_: None
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
        with lines(title, say_error) as update:
            yield update


@contextmanager
def progress() -> Iterator[tuple[Callable[[Any], None], dict[str, int]]]:
    """Show the progress of tuning; yields a callback for its events, and the latest counts."""
    # The counts are kept for the summary, which is printed when the bar is gone.
    counts = {"measured": 0, "reused": 0}
    with bar("tuning") as update:
        # Every event has the time budget, which is printed only once.
        said: list[float] = []

        def on_progress(event: Any) -> None:
            if event.budget_s is not None and not said:
                said.append(event.budget_s)
                if not _is_quiet:
                    say_error(f"tuning for at most {event.budget_s:.0f} s")
            counts.update(measured=event.measured, reused=event.reused)
            left = f"{event.measured} measured, {event.reused} from cache"
            if event.seconds_left is not None:
                left += f", {event.seconds_left:.0f} s left"
            update(event.done, event.total, event.kernel, left)

        yield on_progress, counts
