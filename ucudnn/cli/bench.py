"""`ucudnn bench`: steps of a model by its plan beside the other ways that a user has."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from ucudnn.benchmark.statistics import ratio_interval
from ucudnn.cli import options
from ucudnn.cli.console import err, out, progress, say
from ucudnn.cli.options import CacheOption, JsonOption, settings
from ucudnn.cli.targets import NamedModel, name_model
from ucudnn.errors import ConfigError
from ucudnn.plan import Plan
from ucudnn.steps.result import WAYS, StepBench, ways_of
from ucudnn.units import format_bytes, format_ns

if TYPE_CHECKING:
    from ucudnn.config import Config


def bench(
    model: Annotated[str, typer.Argument(help="module:callable that returns a model.")],
    input: options.InputOption = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan file; default: tune now, for the better layout.")
    ] = None,
    ways: Annotated[
        str, typer.Option(help=f"Some of {', '.join(WAYS)}, separated by commas.", metavar="NAMES")
    ] = ",".join(WAYS),
    rounds: Annotated[int, typer.Option(min=5, help="The most rounds; one step by each way.")] = 9,
    workspace_limit: options.WorkspaceLimitOption = None,
    layout: options.LayoutOption = None,
    effort: options.EffortOption = None,
    time_budget: options.TimeBudgetOption = None,
    channels_last: options.ChannelsLastOption = False,
    autocast: options.AutocastOption = False,
    infer: options.InferOption = False,
    config_file: options.ConfigFileOption = None,
    backend: options.BackendOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time whole steps by torch in four ways and by a plan, interleaved, with their memory.

    Example: ucudnn bench examples/models.py:resnet18 --input 32x3x224x224 --workspace-limit 16MiB
    """
    given = {"workspace_limit": workspace_limit, "effort": effort, "time_budget_s": time_budget}
    given |= {"backend": backend, "cache": cache, "ops": "fprop" if infer else None}
    # Of a setting that nobody gave, the better layout: this command looks for the fastest step.
    given |= {"layout": layout or (None if config_file else "auto")}
    chosen = ways_of(ways)
    config = settings(config_file, given)
    if plan is not None and any(value is not None for value in (workspace_limit, layout, effort)):
        raise ConfigError(
            "--plan is tuned already; leave out --workspace-limit, --layout, --effort"
        )
    loaded = None if plan is None else Plan.load(plan)
    # torch is imported only now that the command line is known to be right.
    from ucudnn.steps.bench import bench_steps

    named = name_model(model, input or [], channels_last, autocast, infer)
    named.fill()
    seconds = 0.0
    if loaded is None and any(way.is_planned for way in chosen):
        began = time.monotonic()
        loaded = _tuned(named, config)
        seconds = time.monotonic() - began
    with err.status("") as status, named.context():
        found = bench_steps(
            named.module,
            named.inputs,
            loaded,
            training=not infer,
            ways=chosen,
            rounds=rounds,
            on_progress=lambda name: status.update(f"first step by {name}, then the rounds"),
        )
    _print(found, loaded, seconds, as_json)


def _tuned(named: NamedModel, config: Config) -> Plan:
    from ucudnn.tuning.model import tune_traced
    from ucudnn.tuning.tuner import device_type

    where = device_type(config)
    traced = named.trace(config.ops, where)
    with progress() as (on_progress, _), named.context():
        return tune_traced(
            named.module, named.inputs, traced, config, on_progress, device_type=where
        )


def _print(found: StepBench, plan: Plan | None, seconds: float, as_json: bool) -> None:
    if as_json:
        made = None if plan is None else {"hash": plan.hash, "memory_format": plan.memory_format}
        print(json.dumps({**found.to_dict(), "tuned_s": round(seconds, 1), "plan": made}))
        return
    out.print(bench_table(found))
    if plan is not None and seconds:
        layout = "the model's own layout" if plan.memory_format == "keep" else plan.memory_format
        changed = sum(not kernel.is_default for kernel in plan.kernels)
        say(
            f"Tuning took {seconds:.1f} s; the plan is for {layout} and changes {changed} of "
            f"{len(plan.kernels)} kernels."
        )
    sentence = found.sentence()
    say(f"{sentence[0].upper()}{sentence[1:]}.")


def bench_table(found: StepBench) -> Table:
    """One row per way: time, ratio to the first, memory."""
    what = "training step (forward, loss, backward)" if found.is_training else "inference"
    able = [one for one in found.ways if one.samples_ns]
    rounds = len(able[0].samples_ns) if able else 0
    table = Table(
        title=f"A {what}" if found.is_training else f"One {what}",
        caption=f"median ± interquartile range of {rounds} interleaved rounds; allocated: by torch "
        "in a step, process: what the process gained in it",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    first = able[0].way.name if able else "the first"
    for heading in ("by", "step", f"ratio to {first}", "allocated", "process", "first step"):
        table.add_column(heading, justify="left" if heading == "by" else "right")
    for one in found.ways:
        if not one.samples_ns:
            table.add_row(one.way.name, f"failed: {one.reason}")
            continue
        ratio, low, high = ratio_interval(one.samples_ns, able[0].samples_ns)
        table.add_row(
            one.way.name,
            f"{format_ns(one.time_ns)} ± {format_ns(one.spread_ns)}",
            f"{ratio:.2f} ({low:.2f} to {high:.2f})",
            format_bytes(one.peak_bytes),
            "-" if one.process_bytes is None else format_bytes(one.process_bytes),
            f"{one.first_s:.1f} s",
        )
    return table
