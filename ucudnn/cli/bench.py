"""`ucudnn bench`: steps of a model by its plan beside the other ways that a user has."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from ucudnn.benchmark.statistics import ratio_interval
from ucudnn.cli import options
from ucudnn.cli.console import bar, out, progress, say
from ucudnn.cli.options import CacheOption, JsonOption, passes, settings
from ucudnn.cli.targets import NamedModel, Recipe, name_model
from ucudnn.errors import ConfigError
from ucudnn.plan import Plan
from ucudnn.steps.result import WAYS, StepBench, Way, ways_of
from ucudnn.units import format_bytes, format_ns

if TYPE_CHECKING:
    from ucudnn.config import Config


@options.takes_model(options.ModelArgument)
def bench(
    recipe: Recipe,
    plan: Annotated[
        Path | None,
        typer.Option(help="A plan file; default: tune now, for the better layout.", metavar="FILE"),
    ] = None,
    ways: Annotated[
        str, typer.Option(help=f"Some of {', '.join(WAYS)}, separated by commas.", metavar="NAMES")
    ] = ",".join(WAYS),
    rounds: Annotated[
        int, typer.Option(min=5, help="The most rounds; one step by each way.", metavar="COUNT")
    ] = 9,
    workspace_limit: options.WorkspaceLimitOption = None,
    layout: options.LayoutOption = None,
    effort: options.EffortOption = None,
    time_budget: options.TimeBudgetOption = None,
    config_file: options.ConfigFileOption = None,
    backend: options.BackendOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time whole steps by torch in four ways and by a plan, interleaved, with their memory.

    Example: ucudnn bench examples/models.py:resnet18 --input 32x3x224x224 --workspace-limit 16MiB
    """
    given = {"workspace_limit": workspace_limit, "effort": effort, "time_budget_s": time_budget}
    given |= {"backend": backend, "cache": cache, "layout": layout}
    chosen = ways_of(ways)
    # Flags of tuning and of the trace before it.
    of_tuning = {**given, "config": config_file, "real": recipe.real or None}
    _refuse_idle(of_tuning, plan, is_planned=any(way.is_planned for way in chosen))
    given |= {"ops": passes(None, recipe.infer)}
    # Of a setting that nobody gave, the better layout: this command looks for the fastest step.
    given |= {"layout": layout or (None if config_file else "auto")}
    config = settings(config_file, given)
    loaded = None if plan is None else Plan.load(plan)
    named = _one_size(name_model(recipe))
    named.fill()
    seconds = 0.0
    if loaded is None and any(way.is_planned for way in chosen):
        began = time.monotonic()
        loaded = _tuned(named, config)
        seconds = time.monotonic() - began
    found = _bench(named, loaded, chosen, rounds)
    _print(found, loaded, seconds, as_json)


def _refuse_idle(of_tuning: dict[str, Any], plan: Path | None, is_planned: bool) -> None:
    """Refuse flags of tuning where nothing is tuned, and a plan that no step follows."""
    idle = [name for name, value in of_tuning.items() if value is not None]
    reason = "--plan is tuned already"
    if not is_planned:
        reason = "--ways has none that follows a plan"
        idle += [] if plan is None else ["plan"]
    elif plan is None:
        return
    if idle:
        flags = ", ".join(_flag(name) for name in idle)
        raise ConfigError(f"{reason}; leave out {flags}")


def _flag(name: str) -> str:
    return f"--{name.removesuffix('_s').replace('_', '-')}"


def _one_size(named: NamedModel) -> NamedModel:
    if len(named.examples) > 1:
        raise ConfigError(
            f"ucudnn bench times steps of one input size, got {len(named.examples)} sizes; "
            f"call it once for each"
        )
    return named


def _bench(named: NamedModel, plan: Plan | None, chosen: tuple[Way, ...], rounds: int) -> StepBench:
    # torch is imported only now that the command line is known to be right.
    from ucudnn.steps.bench import bench_steps

    begun: list[str] = []
    with bar("timing steps") as update, named.context():

        def on_progress(name: str) -> None:
            update(len(begun), len(chosen), f"first step by {name}, then the rounds")
            begun.append(name)

        return bench_steps(
            named.module,
            named.examples[0],
            plan,
            training=not named.recipe.infer,
            ways=chosen,
            rounds=rounds,
            on_progress=on_progress,
        )


def _tuned(named: NamedModel, config: Config) -> Plan:
    from ucudnn.tuning.model import tune_traced
    from ucudnn.tuning.tuner import device_type

    where = device_type(config)
    traced = named.trace(config.ops, where)
    with progress() as (on_progress, _), named.context():
        return tune_traced(
            named.module, named.examples, traced, config, on_progress, device_type=where
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
