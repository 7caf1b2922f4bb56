"""The command line: each command parses, calls one public function and prints."""

from __future__ import annotations

import sys
import warnings
from io import TextIOWrapper

import typer

from ucudnn.cli import cache, look
from ucudnn.cli.advise import advise
from ucudnn.cli.bench import bench
from ucudnn.cli.check import check, compare
from ucudnn.cli.console import (
    ENVIRONMENT,
    INTERRUPTED,
    SAYS_NO,
    USAGE,
    InterruptedCommandError,
    fail,
    show_warning,
)
from ucudnn.cli.launch import launch
from ucudnn.cli.tune import tune
from ucudnn.errors import ConfigError, PlanError, ProblemError, UcudnnError

app = typer.Typer(
    name="ucudnn",
    help="Split the mini-batch of each convolution, so that fast algorithms fit.",
    no_args_is_help=True,
    add_completion=False,
    # Expected errors are sentences (`main`); of any other Python's own traceback tells most.
    pretty_exceptions_enable=False,
)
app.command()(tune)
app.command()(advise)
app.command()(bench)
app.command("enumerate")(look.enumerate_)
app.command()(look.show)
app.command()(look.report)
app.command()(look.doctor)
app.command()(check)
app.command()(compare)
# What follows the script's name are the script's options.
app.command(context_settings={"allow_interspersed_args": False})(launch)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Run the command line; an error prints one sentence and sets the exit status.

    Exit status: 0 done, 1 the answer is no, 2 wrong usage, 3 the environment does not allow it,
    130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # files may hold names that no terminal can show
            stream.reconfigure(errors="backslashreplace")
    try:
        # It puts `showwarning` back at the end, for a caller that goes on after `main`.
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            app()
    except InterruptedCommandError as error:
        fail(str(error), INTERRUPTED)
    # The subclasses come first: the first clause that matches sets the exit status.
    except (ConfigError, ProblemError) as error:
        fail(str(error), USAGE)
    except PlanError as error:
        fail(str(error), SAYS_NO)
    except UcudnnError as error:
        fail(str(error), ENVIRONMENT)
