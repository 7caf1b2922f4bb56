"""The command line: a skin that parses, calls one public function and prints."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Annotated

import typer

from ucudnn import __version__
from ucudnn.cli import cache, look, script
from ucudnn.cli.advise import advise
from ucudnn.cli.check import check, compare
from ucudnn.cli.console import (
    ENVIRONMENT,
    INTERRUPTED,
    SAYS_NO,
    USAGE,
    InterruptedCommandError,
    fail,
    say,
    show_warning,
)
from ucudnn.cli.tune import tune
from ucudnn.config import Startup, set_startup
from ucudnn.errors import ConfigError, PlanError, ProblemError, UcudnnError

app = typer.Typer(
    name="ucudnn",
    help="Split the mini-batch of each convolution, so that fast algorithms fit.",
    no_args_is_help=True,
    # -h as well, which commands inherit.
    context_settings={"help_option_names": ["-h", "--help"]},
    # Expected errors are sentences (`main`); of any other Python's own traceback tells most.
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"ucudnn {__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", help="Print the version.", is_eager=True, callback=_print_version
    ),
]


@app.callback()
def _before(context: typer.Context, version: VersionOption = False) -> None:
    del version  # its callback has printed it
    # Commands measure and check what torch does by itself.
    if context.invoked_subcommand != "run":
        set_startup(Startup())


app.command()(tune)
app.command()(advise)
app.command("enumerate")(look.enumerate_)
app.command(context_settings=script.SETTINGS)(script.run)
app.command(context_settings=script.SETTINGS)(script.record)
app.command()(look.show)
app.command()(look.report)
app.command()(look.doctor)
app.command()(check)
app.command()(compare)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Run the command line; every error is one sentence and an exit status.

    Exit status: 0 done, 1 the answer is no, 2 wrong usage, 3 the environment does not allow it,
    130 interrupted. A script that `run` or `record` runs has its own.
    """
    call = _command()
    # Outside of everything that the commands changed in this process, and of any exception.
    if call is not None:
        script.execute(call)


def _command() -> script.ScriptCall | None:
    """Run a command; returns the script that it asks to run, if it does."""
    with _printable_names():
        try:
            # It puts `showwarning` back at the end, for a caller that goes on after `main`.
            with warnings.catch_warnings():
                warnings.showwarning = show_warning
                app()
        except script.ScriptCall as call:
            return call
        except InterruptedCommandError as error:
            fail(str(error), INTERRUPTED)
        # The subclasses come first: the first clause that matches sets the exit status.
        except (ConfigError, ProblemError) as error:
            fail(str(error), USAGE)
        except PlanError as error:
            fail(str(error), SAYS_NO)
        except UcudnnError as error:
            fail(str(error), ENVIRONMENT)
    return None


@contextmanager
def _printable_names() -> Iterator[None]:
    """Let stdout and stderr take names that no terminal can show; afterwards as before."""
    streams = [one for one in (sys.stdout, sys.stderr) if isinstance(one, TextIOWrapper)]
    before = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream, errors in zip(streams, before, strict=True):
            stream.reconfigure(errors=errors)
