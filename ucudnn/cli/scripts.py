"""`ucudnn run`, `record`, `launch`: run a script by a plan, record it, or start it in ranks.

`run` and `record` run the script in this process as Python would: arguments, `__main__`, exit
status and tracebacks are the script's own. Processes that the script starts find the path of the
plan, or of the table to write, in their environment.
"""

from __future__ import annotations

import atexit
import builtins
import os
import runpy
import shlex
import signal
import sys
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Annotated

import typer

from ucudnn.cli.console import SAYS_NO, fail, say, say_error
from ucudnn.cli.options import require_file
from ucudnn.config import Config, Startup, set_startup, startup
from ucudnn.errors import ConfigError, RankError, UcudnnError, quoted
from ucudnn.layer_table import lock_of, read_rows
from ucudnn.plan import Plan
from ucudnn.units import parse_bytes

# The script's name and all words after it belong to the script, even if no `--` precedes the name.
SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
ScriptArgument = Annotated[
    list[str],
    typer.Argument(
        help="After --: a script, or -m and a module, with its arguments.",
        metavar="SCRIPT [ARGUMENT]...",
    ),
]


class ScriptCall(BaseException):
    """Raised by `run` and `record` to let `main` run a script; typer lets it pass.

    It is no `Exception`, because typer and `_command` would take that for an error.
    """

    def __init__(self, words: list[str], files: Startup) -> None:
        super().__init__(words)
        self.words = words
        self.files = files


def run(
    script: ScriptArgument,
    plan: Annotated[
        Path | None, typer.Option(help="A plan file; default: UCUDNN_PLAN.", metavar="FILE")
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            help="Plan the script's model in its first step, within 8GiB, 50% or available; "
            "default: UCUDNN_MEMORY_BUDGET.",
            metavar="BUDGET",
        ),
    ] = None,
) -> None:
    """Run a Python script by a plan, or within a memory budget; the script is not changed.

    Processes that it starts, such as the ranks of torchrun, do the same. With a memory budget, the
    model is planned when its first training forward begins. The plan is kept beside the cache, so
    that the next start plans nothing.

    Example: ucudnn run --memory-budget 8GiB -- train.py --epochs 3
    """
    path, budget = plan or startup().plan, memory_budget or startup().memory_budget
    if plan is not None and memory_budget is not None:
        raise ConfigError("--plan is a plan, and --memory-budget has one made; leave one out")
    if memory_budget is not None or path is None:
        if budget is None:
            raise ConfigError(
                "--plan FILE is needed, which `ucudnn tune -o` writes, or --memory-budget 8GiB"
            )
        # A budget that is none is refused before the script has done anything.
        try:
            Config(memory_budget=budget)
        except ConfigError as error:
            raise ConfigError(f"--{str(error).replace('_', '-', 1)}") from error
        raise ScriptCall(_checked(script), Startup(memory_budget=budget))
    # So is a plan that cannot be read or followed.
    if Plan.load(path).micro_batch is not None:
        raise ConfigError(
            f"{path} asks the training loop for micro-batches, which no unchanged script has; add "
            f"these lines to it, or tune without --loop:\n"
            f"    ucudnn.convert_(model, plan)\n"
            f"    for part in plan.micro_batches(images, labels):"
        )
    raise ScriptCall(_checked(script), Startup(plan=str(Path(path).resolve())))


def record(
    script: ScriptArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="CSV file to write.", metavar="FILE")
    ] = Path("layers.csv"),
) -> None:
    """Run a Python script and write its convolutions as a table of layers, for `ucudnn tune`.

    Example: ucudnn record -o layers.csv -- train.py --epochs 1
    """
    require_file(output)
    path, words = output.resolve(), _checked(script)
    # An old table is removed, because processes add their counts to a table that exists.
    path.unlink(missing_ok=True)
    # Exit handlers run in the reverse order of their registration. So this one runs after the
    # recorder's, which is registered later, when torch is imported, and which writes the table.
    atexit.register(_tell, path, os.getpid())
    raise ScriptCall(words, Startup(record=str(path)))


def _checked(words: list[str]) -> list[str]:
    if words[0] == "-m" and len(words) == 1:
        raise ConfigError("-m must be followed by the name of a module")
    if words[0] != "-m" and not Path(words[0]).is_file():
        hint = "-m torch.distributed.run" if words[0] == "torchrun" else "-m MODULE"
        raise ConfigError(
            f"after the options comes a script that exists, or {hint}, got {quoted(words[0])}"
        )
    return words


def _tell(path: Path, process: int) -> None:
    # A forked child has this handler, too, but only the first process reports.
    if os.getpid() != process:
        return
    lock_of(path).unlink(missing_ok=True)
    try:
        rows = read_rows(path) if path.exists() else []
    except UcudnnError as error:
        say_error(str(error))
        return
    if not rows:
        say_error(f"no convolution was computed, and {path.name} was not written")
        return
    calls = sum(row.calls for row in rows)
    say_error(f"recorded {calls} calls of {len(rows)} convolutions; written to {path}")
    name = shlex.quote(path.name)
    say_error(f"next: ucudnn tune {name} --workspace-limit 64MiB -o plan.json")


def execute(call: ScriptCall) -> None:
    """Run a script as `python` would; an error of the script is printed and raised again."""
    set_startup(call.files)
    if not _torch_calls_us():
        # Usually torch calls `follow_startup` at its import. If it will not, as in a checkout of
        # ucudnn that is not installed, the function is called here.
        import torch  # noqa: F401 - ucudnn's modules are imported after torch

        from ucudnn.unchanged import follow_startup

        follow_startup(call.files)
    try:
        _run(call.words)
    except SystemExit:
        raise
    except BaseException as error:
        # The traceback is printed here, without the frames above the script. The exception is
        # raised again, so that the interpreter ends as it does for any script; `sys.excepthook`
        # then prints nothing.
        sys.excepthook(type(error), error.with_traceback(_own(error.__traceback__)), None)
        sys.excepthook = lambda *_: None
        raise


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        _set_first_path(os.getcwd())
        sys.argv = ["-m", *words[2:]]
        # `runpy.run_module` would remove `__main__` after the module's last line. But threads that
        # still run, and exit handlers, may need what the script has defined in it. `python -m`
        # calls the function below, which also puts the module's path in sys.argv[0].
        sys.modules["__main__"] = ModuleType("__main__")
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    sys.argv = list(words)
    _run_file(Path(words[0]))


def _run_file(path: Path) -> None:
    # `runpy.run_path` is not used: it would set sys.argv[0] and `__file__` to the same path, and
    # would remove `__main__` after the last line of the script.
    _set_first_path(str(path.resolve().parent))
    name = str(path.absolute())
    loader = SourceFileLoader("__main__", name)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=name, __loader__=loader, __builtins__=builtins)
    sys.modules["__main__"] = main
    code = loader.source_to_code(loader.get_data(name), name)
    exec(code, main.__dict__)  # noqa: S102 - the script that the user asks to run


def _set_first_path(folder: str) -> None:
    # With `python -P`, the folder of the script must not be on the path.
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _own(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on."""
    # If a module or the script has a syntax error, the traceback also begins with frames of
    # importlib, which are left out, too.
    importing = ("<frozen importlib._bootstrap_external>", "<frozen importlib._bootstrap>")
    ours = (__file__, runpy.__file__, "<frozen runpy>", *importing)
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    return traceback


def _torch_calls_us() -> bool:
    # With another value of this variable than "1", its default, torch does not load packages such
    # as ucudnn when it is imported.
    if os.getenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return False
    return bool(entry_points(group="torch.backends", name="ucudnn")) and "torch" not in sys.modules


def launch(
    script: Annotated[list[str], typer.Argument(help="The script and its arguments, after --.")],
    ranks_per_gpu: Annotated[
        str, typer.Option(help="Ranks that share a GPU, or the processor: a number, or auto.")
    ] = "1",
    mps: Annotated[str, typer.Option(help="NVIDIA's MPS: auto, require or off.")] = "auto",
    mps_percent: Annotated[
        int, typer.Option(help="Percent of a GPU that a rank may use under MPS.")
    ] = 100,
    device_workspace: Annotated[
        str | None,
        typer.Option(help="Workspace of all ranks of a device, such as 512MiB; divided equally."),
    ] = None,
    torchrun: Annotated[
        str, typer.Option(help='Further options of torchrun, such as "--max-restarts=2".')
    ] = "",
    trial_seconds: Annotated[
        float, typer.Option(help="For auto: seconds in which a trial counts samples.")
    ] = 10.0,
    trial_rounds: Annotated[int, typer.Option(help="For auto: trials of each number.")] = 3,
) -> None:
    """Run a training script in several ranks for each GPU, or for the cores of a CPU.

    Example: ucudnn launch --ranks-per-gpu 2 -- examples/ddp_resnet.py
    """
    is_auto = ranks_per_gpu == "auto"
    if not is_auto and not ranks_per_gpu.isdecimal():
        raise ConfigError(f"--ranks-per-gpu must be a number or auto, got {ranks_per_gpu!r}")
    # These modules import torch, so they are imported only now that the command line was read.
    from torch.distributed.elastic.multiprocessing import SignalException

    from ucudnn.distributed.counting import TrialTimes, find_ranks
    from ucudnn.distributed.launching import Launch, launch

    settings = Launch(
        ranks_per_device=1 if is_auto else int(ranks_per_gpu),
        mps=mps,
        mps_percent=mps_percent,
        device_workspace=parse_bytes(device_workspace, "--device-workspace")
        if device_workspace
        else None,
        torchrun_options=tuple(shlex.split(torchrun)),
    )
    try:
        if is_auto:
            # At SIGTERM during a trial, this process must end by an exception, so that it stops the
            # ranks of the trial first. After the trials, torchrun's agent handles signals.
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
            times = TrialTimes(measure_s=trial_seconds)
            found = find_ranks(script, settings, times, trial_rounds, say_error)
            say(f"--ranks-per-gpu {found} is used")
            settings = replace(settings, ranks_per_device=found)
        launch(script, settings, say_error)
    except SignalException as error:
        # The exit status that a shell reports for a process that this signal has ended.
        sys.exit(128 + error.sigval)
    except RankError as error:
        fail(str(error), SAYS_NO)
