"""`ucudnn trace` and `ucudnn enumerate`, and tables of layers as other commands read them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ucudnn.cli import options
from ucudnn.cli.console import Answer, bar, say
from ucudnn.cli.models import Recipe, name_model
from ucudnn.cli.options import settings
from ucudnn.errors import ConfigError, quoted
from ucudnn.layer_table import Row, as_calls, count_calls, format_rows, read_rows
from ucudnn.system.files import write

if TYPE_CHECKING:
    from ucudnn.steps.tracing import Traced


def read_table(recipe: Recipe, ops: tuple[str, ...]) -> list[Row]:
    """Read a table of layers as for a GPU; needs no torch."""
    columns = recipe.dtype, recipe.memory_format, recipe.math
    rows = read_rows(recipe.model, ops, *columns, has_tf32=True)
    if not rows:
        raise ConfigError(f"{recipe.model} has no layer with any of ops={','.join(ops)}")
    return rows


def trace_table(recipe: Recipe, rows: Sequence[Row], device_type: str) -> Traced:
    """The convolutions of a table for a kind of device, in the form of a model's trace."""
    from ucudnn.steps.tracing import Traced

    if device_type != "cuda":
        if recipe.math is not None:
            raise ConfigError(f"--math is about GPUs, and this is for {device_type}; leave it out")
        # Only GPUs have the math "tf32".
        rows = [row._replace(problem=replace(row.problem, math="strict")) for row in rows]
    return Traced(as_calls(rows), frozenset(row.problem for row in rows if row.has_bias))


@options.takes(options.ModelArgument, ("ops",))
def trace(
    recipe: Recipe,
    given: dict[str, Any],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="CSV file to write; default: print it.", metavar="FILE"
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Layouts and TF32 as on cpu or cuda.", metavar="cpu|cuda")
    ] = "cpu",
) -> None:
    """Write the convolutions of a model's training step as a table of layers, without computing it.

    Example: ucudnn trace examples/models.py:resnet18 --input 32x3x224x224 -o layers.csv
    """
    text = format_rows(count_calls(*_traced(recipe, given, device)))
    if output is None:
        # The table is not printed by rich, which would break long lines.
        print(text, end="")
        return
    write(output, text.encode(), "the table of layers")
    say(f"{len(text.splitlines()) - 1} rows; written to {output}")


def _traced(recipe: Recipe, given: Mapping[str, Any], device: str) -> Traced:
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {quoted(device)}")
    wanted = settings(recipe, given).ops
    traced = name_model(recipe).trace(wanted, device)
    if not traced.layers:
        raise ConfigError(f"{recipe.model} computes no convolution on these inputs")
    return traced


@options.takes(options.ModelOrTableArgument, ("ops",))
def enumerate_(
    recipe: Recipe,
    given: dict[str, Any],
    device_profile: Annotated[
        Path,
        typer.Option(
            help="JSON file that `doctor` wrote on the device, or a profile of the package: h200.",
            metavar="FILE",
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="CSV file to write.", metavar="FILE")
    ],
) -> Answer:
    """List every cuDNN engine configuration for each layer and micro-batch; needs no GPU.

    Example: ucudnn enumerate benchmarks/layers/resnet50_n256.csv
    --device-profile h200 -o candidates.csv
    """
    start = time.monotonic()
    # `ops` is taken from `Config`, which checks the names and has the default.
    wanted = settings(recipe, given).ops
    # The table is read first, and the profile before a model is traced, so that errors in them are
    # found at once.
    rows = read_table(recipe, wanted) if recipe.is_table else ()
    # Imported here, because --help need not wait for the cuDNN backend.
    from ucudnn.backends.cudnn.offline import enumerate_candidates
    from ucudnn.backends.cudnn.profile import DeviceProfile

    profile = DeviceProfile.load(device_profile)
    traced = () if recipe.is_table else dict.fromkeys(_traced(recipe, given, "cuda").layers)
    layers = [*((row.name, row.problem) for row in rows), *traced]
    with bar("asking cuDNN") as update:
        found = enumerate_candidates(layers, profile, output, update)
    seconds = round(time.monotonic() - start, 3)
    document = {**asdict(found), "seconds": seconds, "output": str(output)}
    return Answer(document, (*found.refused, f"{found} in {seconds:.1f} s; written to {output}."))
