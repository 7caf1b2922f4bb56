"""The command line: a skin that parses, calls one public function and prints."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ucudnn.config import Config
from ucudnn.errors import ConfigError, PlanError, ProblemError, UcudnnError
from ucudnn.plan import Plan

app = typer.Typer(
    name="ucudnn",
    help="Split the mini-batch of each convolution, so that fast algorithms fit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(help="Look at and look after the measurement cache.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")

_SAYS_NO, _USAGE, _ENVIRONMENT, _INTERRUPTED = 1, 2, 3, 130
_out = Console(soft_wrap=False)
_err = Console(stderr=True)

CacheOption = Annotated[
    str | None, typer.Option("--cache", help="Folder of the measurement cache.", metavar="DIR")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def main() -> None:
    """Run the command line; every error is one sentence and an exit status.

    Exit status: 0 done, 1 the answer is no, 2 wrong usage, 3 the environment does not allow it.
    """
    try:
        app()
    except KeyboardInterrupt:
        _fail("interrupted; measurements taken so far are in the cache", _INTERRUPTED)
    except (ConfigError, ProblemError) as error:
        _fail(str(error), _USAGE)
    except PlanError as error:
        _fail(str(error), _SAYS_NO)
    except UcudnnError as error:
        _fail(str(error), _ENVIRONMENT)


def _fail(message: str, status: int) -> None:
    _err.print(f"ucudnn: {message}", style="red", highlight=False, markup=False, soft_wrap=True)
    sys.exit(status)


@app.command()
def tune(
    model: Annotated[str, typer.Argument(help="module:callable that returns a model, or a CSV.")],
    input: Annotated[
        list[str] | None, typer.Option("--input", help="Input shape, such as 64x3x224x224.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the plan here.")
    ] = None,
    workspace_limit: Annotated[
        str | None, typer.Option(help="Workspace each kernel may use, such as 64MiB.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Micro-batch sizes: undivided, powers-of-two or all.")
    ] = None,
    ops: Annotated[
        str | None, typer.Option(help="Some of fprop,dgrad,wgrad, separated by commas.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="For a CSV: dtype of its layers.")] = "float32",
    layout: Annotated[str, typer.Option(help="For a CSV: nchw or nhwc.")] = "nchw",
    channels_last: Annotated[
        bool, typer.Option(help="For a model: convert it and its inputs to channels-last.")
    ] = False,
    autocast: Annotated[
        bool, typer.Option(help="For a model: plan what bfloat16 autocast would run.")
    ] = False,
    infer: Annotated[bool, typer.Option(help="Plan the forward pass only.")] = False,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="JSON file with settings.", metavar="FILE")
    ] = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure convolutions on this machine and write a plan.

    Example: ucudnn tune examples/models.py:resnet18 --input 32x3x224x224 -o resnet18.plan.json
    """
    given = {"workspace_limit": workspace_limit, "policy": policy, "ops": ops, "cache": cache}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if infer:
        settings["ops"] = "fprop"
    config = replace(_read_config(config_file), **settings)
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output must be in a folder that exists, got {output}")
    from ucudnn.tuner import tune_problems

    if _is_table(model):
        from ucudnn.layer_table import read_layers

        layers = read_layers(model, config.ops, dtype, layout)
    else:
        layers = _trace(model, input or [], channels_last, autocast, infer)
    start = time.monotonic()
    with _progress() as (on_progress, counts):
        plan = tune_problems(layers, config, on_progress)
    if output is not None:
        plan.save(output)
    seconds = time.monotonic() - start
    _print_tuned(plan, counts, seconds, output, as_json)


def _print_tuned(
    plan: Plan, counts: dict[str, int], seconds: float, output: Path | None, as_json: bool
) -> None:
    if as_json:
        summary = {
            **counts,
            "seconds": round(seconds, 3),
            "kernels": len(plan.kernels),
            "hash": plan.hash,
            "workspace_bytes": plan.workspace_bytes,
            "predicted_time_ns": plan.predicted_time_ns,
            "output": None if output is None else str(output),
        }
        print(json.dumps(summary))
        return
    from ucudnn.tables import plan_summary, plan_table

    _out.print(plan_table(plan))
    _out.print(plan_summary(plan), highlight=False)
    if counts["measured"]:
        said = f"Measured {counts['measured']} candidates in {seconds:.1f} s"
    else:
        said = f"Measured nothing: everything was in the cache ({seconds:.1f} s)"
    where = f"; plan written to {output}" if output else "; no -o FILE, so the plan was not kept"
    _out.print(f"{said}, reused {counts['reused']}{where}.", highlight=False, soft_wrap=True)


@app.command()
def show(
    plan: Annotated[Path, typer.Argument(help="A plan file.")],
    kernel: Annotated[
        str | None, typer.Option(help="Every batch of one kernel: its number or layer name.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a plan: per kernel torch's default, the split, times and workspaces.

    Example: ucudnn show resnet18.plan.json --kernel 3
    """
    loaded = Plan.load(plan)
    if as_json:
        print(json.dumps(loaded.to_dict()))
        return
    from ucudnn.tables import kernel_table, plan_summary, plan_table

    if kernel is None:
        _out.print(plan_table(loaded))
        _out.print(plan_summary(loaded), highlight=False)
        return
    chosen = [
        entry
        for index, entry in enumerate(loaded.kernels)
        if kernel == str(index) or kernel in entry.layers
    ]
    if not chosen:
        raise ConfigError(
            f"--kernel must be a number from 0 to {len(loaded.kernels) - 1} or the name of a layer "
            f"of the plan, got {kernel!r}"
        )
    for entry in chosen:
        _out.print(kernel_table(entry))
        _out.print(f"layers: {', '.join(entry.layers)}", highlight=False)


@app.command()
def doctor(cache: CacheOption = None, as_json: JsonOption = False) -> None:
    """Say what tuning depends on here: device, versions, threads, malloc, cache.

    Example: ucudnn doctor --json
    """
    from ucudnn.doctor import diagnose
    from ucudnn.units import format_ns

    found = diagnose(cache or Config().cache)
    if as_json:
        print(json.dumps({**asdict(found), "advice": found.advice}))
        return
    rows = {
        "device": str(found.device),
        "torch": found.software.torch,
        "oneDNN": found.software.onednn or "not in this torch",
        "threads": str(found.conditions.threads),
        "malloc": found.conditions.allocator,
        "filling 64 MiB": f"{format_ns(found.fresh_ns)} freshly allocated, "
        f"{format_ns(found.reused_ns)} in use",
        "load": f"{found.load:.1f}",
        "cache": found.cache_path + ("" if found.cache_writable else " (read-only)"),
    }
    for name, value in rows.items():
        _out.print(f"{name:>15}  {value}", highlight=False, markup=False, soft_wrap=True)
    for sentence in found.advice or ("Nothing to advise.",):
        _out.print(sentence, highlight=False, markup=False, soft_wrap=True)


def _read_config(path: Path | None) -> Config:
    if path is None:
        return Config()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config must be a JSON file with settings: {path}: {error}") from error
    known = {*Config().to_dict(), "cache"}
    if not isinstance(values, dict) or not set(values) <= known:
        raise ConfigError(f"{path} must hold an object with some of {', '.join(sorted(known))}")
    return Config(**values)


def _is_table(model: str) -> bool:
    return model.endswith(".csv") or ":" not in model


def _trace(
    model: str, inputs: list[str], channels_last: bool, autocast: bool, infer: bool
) -> list[Any]:
    import torch

    from ucudnn.tracing import trace_layers

    if not inputs:
        raise ConfigError(f"a model needs --input with a shape such as 64x3x224x224, for {model}")
    tensors = tuple(torch.empty(_shape(text)) for text in inputs)
    module = _load_model(model)
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
        tensors = tuple(
            tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
            for tensor in tensors
        )
    if infer:
        module = module.eval().requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        return trace_layers(module, tensors)


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2,4}", text):
        raise ConfigError(
            f"--input must be batch x channels x sizes, such as 64x3x224x224, got {text!r}"
        )
    return tuple(map(int, text.split("x")))


def _load_model(spec: str) -> Any:
    """Call what `module:callable` or `file.py:callable` names, which must return a torch module."""
    from torch import nn

    name, _, attribute = spec.rpartition(":")
    path = Path(name)
    if path.suffix == ".py":
        folder, name = path.parent, path.stem
    else:
        folder = Path()
    sys.path.insert(0, os.path.abspath(folder))
    try:
        module = importlib.import_module(name)
        made = getattr(module, attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"MODEL must be module:callable, called without arguments, or a .csv of layers; "
            f"{spec}: {error}"
        ) from error
    finally:
        sys.path.pop(0)
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"{spec} must return a torch.nn.Module, it returned {type(made).__name__}"
        )
    return made


@contextmanager
def _progress() -> Iterator[tuple[Callable[[Any], None], dict[str, int]]]:
    """A progress bar on the terminal, and the counts of the last event."""
    counts = {"measured": 0, "reused": 0}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=_err, transient=True) as bar:
        task = bar.add_task("", total=None, counts="")

        def on_progress(event: Any) -> None:
            counts.update(measured=event.measured, reused=event.reused)
            bar.update(
                task,
                description=event.kernel,
                completed=event.done,
                total=event.total,
                counts=f"{event.measured} measured, {event.reused} from cache",
            )

        yield on_progress, counts
