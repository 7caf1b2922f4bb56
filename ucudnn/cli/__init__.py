"""The command line: each command parses its flags, calls one public function and prints."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from traceback import print_exception
from typing import Annotated

import typer

import ucudnn
from ucudnn.cli import cache, machine, plans, scripts, tables
from ucudnn.cli.console import (
    CRASHED,
    ENVIRONMENT,
    INTERRUPTED,
    SAYS_NO,
    USAGE,
    InterruptedCommandError,
    fail,
    say,
    show_warning,
)
from ucudnn.cli.options import common
from ucudnn.cli.tune import tune
from ucudnn.config import Startup, set_startup
from ucudnn.errors import (
    ConfigError,
    OutputError,
    PlanError,
    PlanFileError,
    ProblemError,
    TableError,
    UcudnnError,
)

app = typer.Typer(
    name="ucudnn",
    help="Split the mini-batch of each convolution, so that fast algorithms fit.",
    no_args_is_help=True,
    # Adds -h to --help; all commands inherit this setting.
    context_settings={"help_option_names": ["-h", "--help"]},
    # `main` prints an expected error as one sentence; other errors keep Python's traceback.
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"ucudnn {ucudnn.__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version),
]


@app.callback()
def _before(context: typer.Context, version: VersionOption = False) -> None:
    del version  # `_print_version` has printed it
    # Only scripts that `run` and `launch` start follow the plan of UCUDNN_PLAN. For all other
    # commands, it and UCUDNN_RECORD are unset, so that torch's own convolutions run in them.
    if context.invoked_subcommand not in ("run", "launch"):
        set_startup(Startup())


app.command()(tune)
app.command()(machine.foresee)
app.command()(machine.advise)
app.command()(tables.trace)
app.command("enumerate")(tables.enumerate_)
app.command(context_settings=scripts.SETTINGS)(scripts.run)
app.command(context_settings=scripts.SETTINGS)(scripts.record)
app.command()(common(plans.show))
app.command()(common(plans.report))
app.command()(common(machine.doctor))
app.command()(common(plans.check))
app.command()(common(plans.compare))
# Options after the name of the script that `launch` starts belong to the script.
app.command(context_settings={"allow_interspersed_args": False})(scripts.launch)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Run the command line; an expected error prints one sentence and sets the exit status.

    Exit status: 0 for success, 1 if the answer is no (as of `check`), 2 for wrong usage or a file
    that cannot be read, 3 if the environment prevents the command, 4 for an error of ucudnn itself
    (with a traceback), 130 if interrupted. A script that `run` or `record` runs sets its own.
    """
    call = _command()
    # For `run` and `record`, `_command` only returns the script to run. The script runs here: by
    # now `_command` has restored warnings and streams, and no exception is being handled.
    if call is not None:
        scripts.execute(call)


def _command() -> scripts.ScriptCall | None:
    with _printable_names():
        try:
            # `catch_warnings` restores `showwarning` at the end, for a caller that goes on after
            # `main`.
            with warnings.catch_warnings():
                warnings.showwarning = show_warning
                app()
        except scripts.ScriptCall as call:
            return call
        except InterruptedCommandError as error:
            fail(str(error), INTERRUPTED)
        except UcudnnError as error:
            fail(str(error), _status(error))
        # This is an error of ucudnn itself. Python would end with exit status 1, which means "no".
        except Exception as error:
            print_exception(error)
            raise SystemExit(CRASHED) from error
    return None


def _status(error: UcudnnError) -> int:
    # OutputError counts as ENVIRONMENT: a full disk is not the fault of the user.
    if isinstance(error, (ConfigError, ProblemError, PlanFileError, TableError)):
        return USAGE
    if isinstance(error, PlanError) and not isinstance(error, OutputError):
        return SAYS_NO
    return ENVIRONMENT


@contextmanager
def _printable_names() -> Iterator[None]:
    """Let stdout and stderr escape characters that they cannot encode, within the context."""
    streams = [one for one in (sys.stdout, sys.stderr) if isinstance(one, TextIOWrapper)]
    before = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream, errors in zip(streams, before, strict=True):
            stream.reconfigure(errors=errors)
