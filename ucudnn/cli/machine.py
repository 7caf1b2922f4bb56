"""`ucudnn foresee`, `advise` and `doctor`: what steps of a model take, and what this machine is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import to_builtins
from rich.table import Table

import ucudnn
from ucudnn.cli import options
from ucudnn.cli.console import Answer, bar, say
from ucudnn.cli.models import Recipe, name_model
from ucudnn.cli.options import CacheOption, settings
from ucudnn.config import Config
from ucudnn.errors import ConfigError, quoted
from ucudnn.plan import Plan
from ucudnn.reports.text import as_sentence, kernel_name, simple_table
from ucudnn.units import format_bytes, format_ns, parse_bytes

if TYPE_CHECKING:
    from ucudnn.advice import Advice
    from ucudnn.doctor import Diagnosis
    from ucudnn.outcomes import Foresight
    from ucudnn.plan import Timing


# The most modules that `foresee` lists.
_MOST_MODULES = 8


@options.takes(options.ModelArgument, ("backend",), without=("real",))
def foresee(
    recipe: Recipe,
    given: dict[str, Any],
    plan: Annotated[
        Path | None, typer.Option(help="A plan that the step follows.", metavar="FILE")
    ] = None,
    evaluate: Annotated[
        bool, typer.Option("--eval", help="Forward only, in evaluation mode.", metavar="")
    ] = False,
    optimizer: Annotated[
        str | None, typer.Option(help="Count its state, such as adamw's.", metavar="NAME")
    ] = None,
    fits: Annotated[
        str | None,
        typer.Option(help="Print the largest batch that fits, such as 8GiB.", metavar="BYTES"),
    ] = None,
) -> Answer:
    """Foresee the peak memory and the time of a step, without running it.

    Example: ucudnn foresee examples/models.py:resnet18 --input 32x3x224x224 --fits 2GiB
    """
    limit = None if fits is None else parse_bytes(fits, "--fits")
    recipe = recipe._replace(infer=recipe.infer or evaluate)
    config = settings(recipe, given)
    if config.is_replayed:
        raise ConfigError(
            "a step is foreseen for this machine, and the settings name a recording; leave out "
            "--backend recorded"
        )
    known = None if plan is None else Plan.load(plan)
    from ucudnn.steps import foresee as room
    from ucudnn.steps.advise import largest_batches

    # These checks come before the model is made, which may take long.
    if optimizer is not None and optimizer not in room.OPTIMIZERS:
        raise ConfigError(
            f"--optimizer must be one of {', '.join(room.OPTIMIZERS)}, got {quoted(optimizer)}"
        )
    named = name_model(recipe)
    if limit is not None and len(named.examples) > 1:
        raise ConfigError("--fits is about batches of one size of inputs; give --input one shape")
    named.fill()
    arguments = named.module, named.examples, known, config
    with bar("foreseeing a step"), named.context():
        found = room.foresee(*arguments, optimizer=optimizer)
        document, lines = to_builtins(found), [*_foresight_lines(found)]
        if limit is not None:
            batches = largest_batches(*arguments, limit, optimizer=optimizer)
            document["fits"] = batches
            lines += (f"Within {fits}, {batches[way]} samples fit {way}." for way in batches)
    return Answer(document, lines)


def _foresight_lines(found: Foresight) -> Iterator[str]:
    yield as_sentence(str(found))
    largest, others = found.fills[:_MOST_MODULES], found.fills[_MOST_MODULES:]
    rows = [*found.held, *largest]
    if others:
        rows.append((f"{len(others)} other modules", sum(size for _, size in others)))
    for what, size in rows:
        yield f"{format_bytes(size):>12}  {what}"
    for note in found.notes:
        yield f"Not exact: {note}."


@options.takes(options.ModelArgument, ("ops", "backend", "memory_budget"))
def advise(
    recipe: Recipe,
    given: dict[str, Any],
    config_file: options.ConfigFileOption = None,
    everything: options.AllOption = False,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Foresee all of it, and run no step.", metavar="")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks of a job that is not here; with --link.")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="Latency and rate between its ranks, as 30us,1.25GB/s.", metavar="TIME,RATE"
        ),
    ] = None,
) -> Answer | None:
    """Run a step in several ways for about a minute; print memory, times and a verdict.

    With a memory budget, also print the largest batch that fits. In several ranks (torchrun), or
    with --ranks and --link, print how much time waiting for gradients costs, and which way to send
    them is worth using.

    Example: ucudnn advise examples/models.py:resnet18 --input 32x3x224x224
    """
    config = settings(recipe, given, config_file)
    # This module and the next import torch, which takes seconds. So they are imported only after
    # --help and wrong settings have been handled.
    from ucudnn.distributed import startup

    if ranks is not None or link is not None or startup.is_in_job():
        if given or config_file or everything or dry:
            raise ConfigError(
                "in ranks, advise takes no settings and no --all, as it is about exchanges; leave "
                "them out"
            )
        return _advise_in_ranks(recipe, ranks, link)
    from ucudnn.steps import advise as advisor

    # This check comes before the model is made, which may take long.
    advisor.require_live(config)
    named = name_model(recipe)
    named.fill()
    # The bar is shown on stderr, so that stdout holds nothing but the result.
    with bar("running steps") as update, named.context():
        found = advisor.advise(
            named.module,
            named.examples,
            config,
            real=recipe.real,
            dry=dry,
            on_kernel=lambda done, total: update(done, total, "timing kernels"),
        )
    return Answer(found.to_dict(), [*found.sentences(), *([_table(found)] if everything else [])])


def _advise_in_ranks(recipe: Recipe, ranks: int | None, link: str | None) -> Answer | None:
    from ucudnn import distributed

    is_first = True
    if ranks is None and link is None:
        is_first = distributed.init().rank == 0
    named = name_model(recipe)
    named.fill()
    if len(named.examples) > 1:
        raise ConfigError("ranks run one size of inputs; give --input one")
    with named.context():
        found = distributed.advise(named.module, named.examples[0], ranks=ranks, link=link)
    if not is_first:
        return None
    *sentences, verdict = found.sentences()
    table = simple_table()
    for heading in ("way", "harm", "sent", "predicted", "measured"):
        table.add_column(heading, justify="left" if heading in ("way", "harm") else "right")
    for row in found.rows():
        table.add_row(*row)
    return Answer(found.to_dict(), [verdict, *sentences, table])


def _table(advice: Advice) -> Table:
    table = simple_table(
        f"torch's own convolutions on {advice.device}",
        "per call; share: of all calls in a step; direct: a direct convolution at the full speed "
        "of this machine; !: five times that, or twice the time in channels_last",
    )
    table.add_column("kernel", overflow="fold", min_width=16)
    for heading in ("calls", "share", "time", "workspace", "channels_last", "workspace", "direct"):
        table.add_column(heading, justify="right", no_wrap=True)
    for kernel in sorted(advice.kernels, key=lambda kernel: -kernel.time_ns()):
        table.add_row(
            kernel_name(kernel.problem),
            str(len(kernel.layers)),
            f"{advice.share(kernel.time_ns()):.1%}{' !' if kernel.is_cliff() else ''}",
            *_cells(kernel.timing),
            *_cells(kernel.channels_last),
            format_ns(kernel.direct_ns) if kernel.direct_ns else "-",
        )
    return table


def _cells(timing: Timing | None) -> tuple[str, str]:
    if timing is None:
        return "-", "-"
    return format_ns(timing.time_ns), format_bytes(timing.workspace_bytes)


def doctor(
    save_device_profile: Annotated[
        Path | None, typer.Option(help="Write the GPU's profile here and end.", metavar="FILE")
    ] = None,
    cache: CacheOption = None,
) -> Answer | None:
    """Print what tuning depends on here: device, versions, threads, malloc, cache.

    Example: ucudnn doctor
    """
    # Imported under another name, because this function has the name of the module.
    from ucudnn import doctor as room

    if save_device_profile is not None:
        profile = room.save_device_profile(save_device_profile)
        say(f"wrote the profile of {profile.name} to {save_device_profile}")
        return None
    # Without --cache, `Config` takes the path from the environment or its default.
    found = room.diagnose(cache or Config().cache)
    # `advice` is a property, which `asdict` leaves out.
    document = {**asdict(found), "advice": found.advice, "ucudnn": ucudnn.__version__}
    return Answer(document, _doctor_lines(found))


def _doctor_lines(found: Diagnosis) -> Iterator[str]:
    rows = {
        "ucudnn": ucudnn.__version__,
        "device": str(found.device),
        "torch": found.software.torch,
        "oneDNN": found.software.onednn or "not in this torch",
        "cuDNN": found.cudnn,
        "threads": str(found.conditions.threads),
        "malloc": found.conditions.allocator,
        "filling 64 MiB": f"{format_ns(found.fresh_ns)} freshly allocated, "
        f"{format_ns(found.reused_ns)} in use",
        "load": f"{found.load:.1f}",
        "cache": found.cache_path + ("" if found.cache_writable else " (read-only)"),
    }
    for name, value in rows.items():
        yield f"{name:>15}  {value}"
    yield from found.advice or ("Nothing to advise.",)
