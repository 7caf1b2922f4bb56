"""Options of commands: their names, their help, and the settings that they give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ucudnn.cli.targets import read_config
from ucudnn.config import Config

# Types of parameters, shared by the commands so that a flag means and says the same in all of them.
CacheOption = Annotated[
    str | None, typer.Option("--cache", help="Folder of the measurement cache.", metavar="DIR")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]

InputOption = Annotated[
    list[str] | None, typer.Option("--input", help="Input shape, such as 64x3x224x224.")
]
OutputOption = Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan here.")]
WorkspaceLimitOption = Annotated[
    str | None, typer.Option(help="Workspace each kernel may use, such as 64MiB.")
]
TotalWorkspaceOption = Annotated[
    str | None, typer.Option(help="One pool of which every call owns a part, such as 512MiB.")
]
MemoryBudgetOption = Annotated[
    str | None,
    typer.Option(
        help="Memory of a whole step, such as 8GiB; +64MiB: so much more than it needs without "
        "workspace."
    ),
]
SolverOption = Annotated[
    str | None, typer.Option(help="Divides the pool: auto, exact, highs or cbc.")
]
PolicyOption = Annotated[
    str | None, typer.Option(help="Micro-batch sizes: undivided, powers-of-two or all.")
]
OpsOption = Annotated[
    str | None, typer.Option(help="Some of fprop,dgrad,wgrad, separated by commas.")
]
# Not in `Config`: a model has its own dtype, only the rows of a CSV lack it.
DtypeOption = Annotated[str, typer.Option(help="For a CSV: dtype of its layers.")]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        help="For a CSV: nchw or nhwc. For a model: keep, or auto for the better of its own "
        "layout and channels_last."
    ),
]
ChannelsLastOption = Annotated[
    bool, typer.Option(help="For a model: convert it and its inputs to channels-last.")
]
AutocastOption = Annotated[
    bool, typer.Option(help="For a model: plan what bfloat16 autocast would run.")
]
InferOption = Annotated[bool, typer.Option(help="Plan the forward pass only.")]
ConfigFileOption = Annotated[
    Path | None, typer.Option("--config", help="JSON file with settings.", metavar="FILE")
]
BackendOption = Annotated[
    str | None,
    typer.Option(help="auto, torch_cpu, cudnn; or recorded: what --cache has, run nothing."),
]
DeviceOption = Annotated[str | None, typer.Option(help="For recorded: part of the device's name.")]
DeviceProfileOption = Annotated[
    Path | None,
    typer.Option(help="For cudnn without its GPU: plan by what --cache has of it.", metavar="FILE"),
]
MathOption = Annotated[
    str, typer.Option(help="For a CSV's float32 layers on a GPU: tf32 or strict.")
]
DeterministicOption = Annotated[
    bool | None,
    typer.Option(
        "--deterministic/--no-deterministic",
        help="Algorithms whose bits never vary alone. Default: as torch is set.",
    ),
]
BatchInvariantOption = Annotated[
    bool | None,
    typer.Option(
        "--batch-invariant/--no-batch-invariant",
        help="Chunks of one size, so that no sample depends on its batch. Default: no.",
    ),
]
EffortOption = Annotated[
    str | None, typer.Option(help="How long to look for how small a gain: quick, normal, thorough.")
]
TimeBudgetOption = Annotated[
    float | None, typer.Option(help="Seconds; what is not finished by then runs torch's own.")
]

RemeasureOption = Annotated[
    bool, typer.Option("--remeasure", help="Take every time anew, whatever the cache has.")
]
FailIfNoisyOption = Annotated[
    bool, typer.Option("--fail-if-noisy", help="Exit with 1 where times are not to be trusted.")
]
# None if neither form is given, so that the config file or the environment decides.
StepRaceOption = Annotated[
    bool | None,
    typer.Option(
        "--step-race/--no-step-race", help="End by timing whole steps of the model. Default: yes."
    ),
]

# None if neither form is given, so that the config file or the environment decides.
CurveOption = Annotated[
    bool | None,
    typer.Option(
        "--curve/--no-curve", help="Measure for every memory, for `show --curve`. Default: no."
    ),
]


def settings(file: Path | None, given: dict[str, Any]) -> Config:
    """Settings from a file or the environment, overridden by flags."""
    # A flag that was not given must not hide the value of the file.
    flags = {name: value for name, value in given.items() if value is not None}
    return replace(read_config(file) if file else Config(), **flags)
