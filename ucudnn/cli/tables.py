"""`ucudnn trace` and `ucudnn enumerate`, and tables of layers as other commands read them."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ucudnn.cli import options
from ucudnn.cli.console import bar, say
from ucudnn.cli.options import JsonOption, passes, settings
from ucudnn.cli.targets import Recipe, name_model
from ucudnn.config import LAYOUTS
from ucudnn.errors import ConfigError
from ucudnn.layer_table import as_calls, counted, format_rows, read_rows
from ucudnn.problem import LAYOUTS as TABLE_LAYOUTS
from ucudnn.system.files import write

if TYPE_CHECKING:
    from ucudnn.tracing import Traced


class TableFlags(NamedTuple):
    """Flags that complete a table of layers, None where they are not given.

    Args:
        dtype: of all layers.
        layout: of all layers; for a model, in what layout to plan it.
        math: of all float32 layers.
    """

    dtype: str | None
    layout: str | None
    math: str | None

    def require_right(self, recipe: Recipe) -> None:
        """Refuse flags that have no effect on what is named.

        Raises:
            ConfigError: there is one, or `layout` has a value that it cannot have there.
        """
        if recipe.is_table:
            recipe.require_table()
        for name, value in (("dtype", self.dtype), ("math", self.math)):
            if value is not None and not recipe.is_table:
                raise ConfigError(
                    f"--{name} is for a table of layers, and {recipe.model} is a model, which has "
                    f"its own; leave it out"
                )
        allowed = TABLE_LAYOUTS if recipe.is_table else LAYOUTS
        if self.layout is not None and self.layout not in allowed:
            what = "the layers of a CSV" if recipe.is_table else "a model"
            raise ConfigError(
                f"--layout must be one of {', '.join(allowed)} for {what}, got {self.layout!r}"
            )


def read_traced(path: str, flags: TableFlags, ops: tuple[str, ...], device_type: str) -> Traced:
    """The convolutions of a table of layers, as a trace of a model has them.

    Args:
        path: the table.
        flags: that complete it.
        ops: passes to read.
        device_type: where they will be computed: TF32 exists on GPUs only.

    Raises:
        ConfigError: the table or a flag is wrong.
    """
    from ucudnn.tracing import Traced

    has_tf32 = device_type == "cuda"
    if flags.math is not None and not has_tf32:
        raise ConfigError(f"--math is about GPUs, and this is for {device_type}; leave it out")
    rows = read_rows(path, ops, *flags, has_tf32=has_tf32)
    if not rows:
        raise ConfigError(f"{path} has no layer with any of ops={','.join(ops)}")
    # A run on a GPU may have been recorded for a plan on a CPU.
    if not has_tf32:
        rows = [row._replace(problem=replace(row.problem, math="strict")) for row in rows]
    return Traced(as_calls(rows), frozenset(row.problem for row in rows if row.has_bias))


@options.takes_model(options.ModelArgument)
def trace(
    recipe: Recipe,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="CSV file to write; default: print it.", metavar="FILE"
        ),
    ] = None,
    ops: options.OpsOption = None,
    device: Annotated[
        str, typer.Option(help="Layouts and TF32 as on cpu or cuda.", metavar="cpu|cuda")
    ] = "cpu",
) -> None:
    """Write the convolutions of a model's training step as a table of layers, without computing it.

    Example: ucudnn trace examples/models.py:resnet18 --input 32x3x224x224 -o layers.csv
    """
    text = format_rows(counted(*_traced(recipe, ops, device)))
    if output is None:
        # Not through rich, which breaks long lines.
        print(text, end="")
        return
    write(output, text.encode(), "the table of layers")
    say(f"{len(text.splitlines()) - 1} rows; written to {output}")


def _traced(recipe: Recipe, ops: str | None, device: str) -> Traced:
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {device!r}")
    if recipe.is_table:
        raise ConfigError(f"MODEL must be a model, and {recipe.model} is a table of layers already")
    wanted = settings(None, {"ops": passes(ops, recipe.infer)}).ops
    traced = name_model(recipe).trace(wanted, device)
    if not traced.layers:
        raise ConfigError(f"{recipe.model} computes no convolution on these inputs")
    return traced


@options.takes_model(options.ModelOrTableArgument)
def enumerate_(
    recipe: Recipe,
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
    ops: options.OpsOption = None,
    dtype: options.DtypeOption = None,
    layout: Annotated[
        str | None,
        typer.Option(help="For a CSV that has no such column: nchw or nhwc.", metavar="NAME"),
    ] = None,
    math: options.MathOption = None,
    batches: Annotated[
        str | None,
        typer.Option(help="Micro-batches such as 1,32; default: powers of two.", metavar="SIZES"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List every cuDNN engine configuration that could run each layer; needs no GPU.

    Example: ucudnn enumerate benchmarks/layers/resnet50_n256.csv
    --device-profile h200 -o candidates.csv
    """
    flags = TableFlags(dtype, layout, math)
    flags.require_right(recipe)
    if layout is not None and not recipe.is_table:
        raise ConfigError("--layout is for a table of layers; --channels-last lays out a model")
    # Imports the cuDNN backend, for which --help need not wait.
    from ucudnn.backends.cudnn.enumeration import enumerate_candidates, parse_batches
    from ucudnn.backends.cudnn.profile import DeviceProfile

    start = time.monotonic()
    # Through `Config`, which checks the names and has the default.
    wanted = settings(None, {"ops": passes(ops, recipe.infer)}).ops
    # The table and the profile are read first, so that a typing error is found at once.
    rows = read_rows(recipe.model, wanted, *flags, has_tf32=True) if recipe.is_table else ()
    sizes = None if batches is None else parse_batches(batches)
    profile = DeviceProfile.load(device_profile)
    traced = () if recipe.is_table else dict.fromkeys(_traced(recipe, ops, "cuda").layers)
    layers = [*((row.name, row.problem) for row in rows), *traced]
    with bar("asking cuDNN") as update:
        found = enumerate_candidates(layers, profile, output, sizes, update)
    document: dict[str, Any] = asdict(found)
    seconds = round(time.monotonic() - start, 3)
    if as_json:
        print(json.dumps({**document, "seconds": seconds, "output": str(output)}))
        return
    for sentence in (*found.refused, f"{found} in {seconds:.1f} s; written to {output}."):
        say(sentence)
