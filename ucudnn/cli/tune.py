"""`ucudnn tune`: measure, or replay measurements, and write a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from ucudnn.cli import options
from ucudnn.cli.console import Answer, InterruptedCommandError, progress
from ucudnn.cli.models import Recipe, name_model
from ucudnn.cli.options import settings
from ucudnn.cli.plans import plan_lines
from ucudnn.cli.tables import read_table, trace_table
from ucudnn.config import SETTINGS, Config
from ucudnn.errors import ConfigError, TuningInterruptedError
from ucudnn.outcomes import Origin
from ucudnn.plan import Plan

if TYPE_CHECKING:
    from ucudnn.kernels.results import Report

    # A function that tunes what the command line names. Its argument is called with the progress.
    _Run = Callable[[Report], Plan]


@options.takes(options.ModelOrTableArgument, SETTINGS)
def tune(
    recipe: Recipe,
    given: dict[str, Any],
    output: options.OutputOption = None,
    config_file: options.ConfigFileOption = None,
    remeasure: options.RemeasureOption = False,
    fail_if_partial: options.FailIfPartialOption = False,
    everything: options.AllOption = False,
) -> Answer:
    """Measure convolutions, or replay measurements, and write a plan.

    Example: ucudnn tune examples/models.py:resnet18 --input 32x3x224x224 -o resnet18.plan.json
    """
    config = settings(recipe, given, config_file)
    _require_sense(recipe, config, given, output)
    run = (
        _table_run(recipe, config, remeasure)
        if recipe.is_table
        else _model_run(recipe, config, remeasure)
    )
    start = time.monotonic()
    plan, counts = _tune(run, output)
    seconds = time.monotonic() - start
    refusal = None
    if fail_if_partial and plan.left_out:
        from ucudnn.reports.text import left_out_sentence

        refusal = f"--fail-if-partial: {left_out_sentence(plan)}"
    known = plan, counts, seconds, output
    lines = [*plan_lines(plan, everything=everything), *_cost_lines(*known)]
    return Answer(_summary(*known), lines, refusal)


def _require_sense(
    recipe: Recipe, config: Config, given: Mapping[str, Any], output: Path | None
) -> None:
    """Refuse flags without effect, and an output file that could not be written."""
    # The setting `step_race` has no effect on a table. Only its flag is refused: in a file or in
    # the environment the setting may be meant for other runs, which tune models.
    if recipe.is_table and given.get("step_race"):
        raise ConfigError("--step-race runs steps of a model, and a table has none; leave it out")
    if recipe.is_table and "compile" in given:
        raise ConfigError("--compile is of a model, and a table has none; leave it out")
    if recipe.is_table and "layout" in given:
        raise ConfigError(
            "--layout is decided by steps of a model, and a table has none; --memory-format, or a "
            "column layout, says how its layers lie in memory"
        )
    if "solver" in given and config.total_workspace is None:
        raise ConfigError("--solver divides --total-workspace, which is not given; give it, too")
    # The output is checked now, because a plan that cannot be written after minutes of measuring
    # would be lost.
    if output is not None:
        options.require_file(output)


def _table_run(recipe: Recipe, config: Config, remeasure: bool) -> _Run:
    """The tuning of a table of layers, which has no model whose steps could be run."""
    rows = read_table(recipe, config.ops)
    # torch is imported only now that the command line and the table are known to be right.
    from ucudnn.kernels.tune import device_type, tune_problems

    traced = trace_table(recipe, rows, device_type(config))
    return partial(tune_problems, traced.layers, config, biased=traced.biased, remeasure=remeasure)


def _model_run(recipe: Recipe, config: Config, remeasure: bool) -> _Run:
    """The tuning of a model."""
    from ucudnn.steps.tune import tune

    named = name_model(recipe)
    runs_steps = config.step_race or config.memory_budget is not None
    # Inputs need values only if steps are run: by --real, or to judge the plan. A replay runs no
    # steps that judge a plan.
    if recipe.real or (runs_steps and not config.is_replayed):
        named.fill()

    def run(on_progress: Report) -> Plan:
        with named.context():
            plan = tune(
                named.module,
                named.examples,
                config,
                on_progress,
                real=recipe.real,
                remeasure=remeasure,
            )
        # The plan notes the name by which its model can be made again.
        return replace(plan, origin=replace(plan.origin or Origin(), model=recipe.model))

    return run


def _tune(run: _Run, output: Path | None) -> tuple[Plan, dict[str, int]]:
    try:
        with progress() as (on_progress, counts):
            plan = run(on_progress)
    # Ctrl-C: the plan so far is kept. No traceback is shown, because it would not help the user.
    except TuningInterruptedError as interrupted:
        raise InterruptedCommandError(_keep(interrupted.plan, output)) from None
    if output is not None:
        plan.save(output)
    return plan, counts


def _keep(plan: Plan, output: Path | None) -> str:
    sentence = "interrupted; measurements taken so far are in the cache"
    if output is None or not plan.kernels:
        return sentence
    plan.save(output)
    left = f"it lacks {len(plan.left_out)} or some of their batches, and " if plan.left_out else ""
    return (
        f"{sentence}, and the plan so far, of {len(plan.kernels)} kernels, is in {output}; {left}"
        f"what is not finished runs torch's own convolution there"
    )


def _summary(
    plan: Plan, counts: dict[str, int], seconds: float, output: Path | None
) -> dict[str, Any]:
    """What was found, as JSON values."""
    from ucudnn.kernels.noise import noise_of
    from ucudnn.reports.cards import steps_to_pay_back

    return {
        **counts,
        "seconds": round(seconds, 3),
        "kernels": len(plan.kernels),
        "hash": plan.hash,
        "left_out": list(plan.left_out),
        "workspace_bytes": plan.workspace_bytes,
        "predicted_time_ns": plan.predicted_time_ns,
        "noise": noise_of(plan).to_dict(),
        "pays_back_steps": steps_to_pay_back(plan, seconds),
        "step_race": to_builtins(plan.step_race),
        "memory_format": plan.memory_format,
        "layout_race": to_builtins(plan.layout_race),
        "compilation": to_builtins(plan.compilation),
        "memory": to_builtins(plan.memory),
        "segments": to_builtins(plan.segments),
        "micro_batch": plan.micro_batch,
        "compiled": plan.compiled,
        "output": None if output is None else str(output),
    }


def _cost_lines(
    plan: Plan, counts: dict[str, int], seconds: float, output: Path | None
) -> Iterator[str]:
    from ucudnn.reports.cards import payback

    # If all measurements came from the cache, tuning had no cost that faster steps have to pay
    # back. A memory budget is kept by steps, which are run anew.
    if counts["measured"] or plan.memory is not None:
        yield payback(plan, seconds)
    said = f"Measured {counts['measured']} candidates in {seconds:.1f} s"
    if counts["reused"] and not counts["measured"]:
        said = f"Measured nothing: everything was in the cache ({seconds:.1f} s)"
    where = f"; plan written to {output}" if output else "; no -o FILE, so the plan was not kept"
    yield f"{said}, reused {counts['reused']}{where}."
