"""Options of commands: their names, their help, and the settings that they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from traceback import format_exception
from typing import Annotated, Any, get_type_hints

import typer

from ucudnn.cli.console import err, set_verbosity
from ucudnn.cli.targets import Recipe, read_config
from ucudnn.config import Config
from ucudnn.errors import ConfigError, UcudnnError

Command = Callable[..., None]
# Type and default of each, by name.
Flags = Mapping[str, tuple[Any, Any]]

# Types of parameters, shared by the commands so that a flag means and says the same in all of them.
CacheOption = Annotated[
    str | None, typer.Option("--cache", help="Folder of the measurement cache.", metavar="DIR")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="module:callable or file.py:callable that returns a model.", metavar="MODEL"
    ),
]
ModelOrTableArgument = Annotated[
    str,
    typer.Argument(
        help="module:callable or file.py:callable that returns a model, or a CSV of layers.",
        metavar="MODEL",
    ),
]
InputOption = Annotated[
    list[str] | None,
    typer.Option(
        help="For a model, once for each of its inputs: [NAME=]SHAPE[,SHAPE ...][:DTYPE], such as "
        "64x3x224x224, t=64:int64, or 64x3x64x64,32x3x96x96 for two sizes.",
        metavar="SPEC",
    ),
]
InputsOption = Annotated[
    str | None,
    typer.Option(
        help="For a model, instead of --input: module:callable or file.py:callable that returns or "
        "yields its inputs: tensors, tuples, or dicts by keyword.",
        metavar="CALLABLE",
    ),
]
ArgsOption = Annotated[
    str | None,
    typer.Option(
        help="For a model: JSON with the arguments of its callable, an object or a list.",
        metavar="JSON",
    ),
]
RealOption = Annotated[
    bool,
    typer.Option(
        "--real", help="For a model whose course depends on values: compute a step to trace it."
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write the plan here.", metavar="FILE")
]
WorkspaceLimitOption = Annotated[
    str | None, typer.Option(help="Workspace each kernel may use, such as 64MiB.", metavar="SIZE")
]
TotalWorkspaceOption = Annotated[
    str | None,
    typer.Option(help="One pool of which every call owns a part, such as 512MiB.", metavar="SIZE"),
]
MemoryBudgetOption = Annotated[
    str | None,
    typer.Option(help="Memory that a whole step may have allocated, such as 8GiB.", metavar="SIZE"),
]
SolverOption = Annotated[
    str | None, typer.Option(help="Divides the pool: auto, exact, highs or cbc.", metavar="NAME")
]
PolicyOption = Annotated[
    str | None,
    typer.Option(help="Micro-batch sizes: undivided, powers-of-two or all.", metavar="NAME"),
]
OpsOption = Annotated[
    str | None,
    typer.Option(help="Some of fprop,dgrad,wgrad, separated by commas.", metavar="NAMES"),
]
# Not in `Config`: a model has its own dtype, only the rows of a CSV lack it.
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="For a CSV that has no such column: dtype. Default: float32.", metavar="NAME"
    ),
]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        help="For a CSV that has no such column: nchw or nhwc. For a model: keep, or auto for the "
        "better of its own layout and channels_last.",
        metavar="NAME",
    ),
]
ChannelsLastOption = Annotated[
    bool,
    typer.Option(
        "--channels-last", help="For a model: convert it and its inputs to channels-last."
    ),
]
AutocastOption = Annotated[
    bool,
    typer.Option(
        "--autocast",
        help="For a model: plan what it runs under autocast, in bfloat16 unless --autocast-dtype "
        "is given.",
    ),
]
AutocastDtypeOption = Annotated[
    str | None,
    typer.Option(help="For a model: autocast to bfloat16 or float16.", metavar="NAME"),
]
InferOption = Annotated[bool, typer.Option("--infer", help="Plan the forward pass only.")]
ConfigFileOption = Annotated[
    Path | None, typer.Option("--config", help="JSON file with settings.", metavar="FILE")
]
BackendOption = Annotated[
    str | None,
    typer.Option(
        help="auto, torch_cpu, cudnn; or recorded: what --cache has, run nothing.", metavar="NAME"
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="For recorded: part of the device's name.", metavar="NAME")
]
DeviceProfileOption = Annotated[
    Path | None,
    typer.Option(help="For cudnn without its GPU: plan by what --cache has of it.", metavar="FILE"),
]
MathOption = Annotated[
    str | None,
    typer.Option(
        help="For a CSV that has no such column, its float32 layers on a GPU: tf32 or strict. "
        "Default: tf32.",
        metavar="NAME",
    ),
]
DeterministicOption = Annotated[
    bool | None,
    typer.Option(
        "--deterministic/--no-deterministic",
        help="Algorithms whose bits never vary alone. Default: as torch is set.",
    ),
]
UnplannedOption = Annotated[
    str | None,
    typer.Option(
        help="What no plan covers: torch (run torch's own and warn) or error.", metavar="NAME"
    ),
]
EffortOption = Annotated[
    str | None,
    typer.Option(
        help="How long to look for how small a gain: quick, normal, thorough.", metavar="NAME"
    ),
]
TimeBudgetOption = Annotated[
    float | None,
    typer.Option(help="Seconds; what is not finished by then runs torch's own.", metavar="SECONDS"),
]

RemeasureOption = Annotated[
    bool, typer.Option("--remeasure", help="Take every time anew, whatever the cache has.")
]
FailIfNoisyOption = Annotated[
    bool, typer.Option("--fail-if-noisy", help="Exit with 1 where times are not to be trusted.")
]
FailIfPartialOption = Annotated[
    bool, typer.Option("--fail-if-partial", help="Exit with 1 where kernels have no plan.")
]
# None if neither form is given, so that the config file or the environment decides.
StepRaceOption = Annotated[
    bool | None,
    typer.Option(
        "--step-race/--no-step-race", help="End by timing whole steps of the model. Default: yes."
    ),
]

CompileOption = Annotated[
    bool,
    typer.Option(
        "--compile", help="For a model: judge the plan by whole steps that torch.compile compiled."
    ),
]
# Flags by which every command describes a model: `Recipe` has a field of each name.
_RECIPE: dict[str, tuple[Any, Any]] = {
    "input": (InputOption, None),
    "inputs": (InputsOption, None),
    "args": (ArgsOption, None),
    "channels_last": (ChannelsLastOption, False),
    "autocast": (AutocastOption, False),
    "autocast_dtype": (AutocastDtypeOption, None),
    "infer": (InferOption, False),
    "real": (RealOption, False),
}
# Flags of every command.
_COMMON: dict[str, tuple[Any, Any]] = {
    "verbose": (
        Annotated[int, typer.Option("-v", "--verbose", count=True, help="Say more; -vv: details.")],
        0,
    ),
    "quiet": (Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress.")], False),
    "traceback": (
        Annotated[bool, typer.Option("--traceback", help="Of an error, show where it is from.")],
        False,
    ),
}


def takes_model(argument: Any) -> Callable[[Command], Command]:
    """Give a command with a parameter `recipe` the flags that describe a model.

    Args:
        argument: type of the positional argument MODEL.
    """

    def changed(command: Command) -> Command:
        def call(**values: Any) -> None:
            described = {name: values.pop(name) for name in ("model", *_RECIPE)}
            described["input"] = tuple(described["input"] or ())
            command(Recipe(**described), **values)

        return _with_flags(command, call, {"model": (argument, Parameter.empty)}, _RECIPE)

    return changed


def common(command: Command) -> Command:
    """Give a command the flags that all commands have."""

    def call(*, verbose: int, quiet: bool, traceback: bool, **values: Any) -> None:
        if verbose and quiet:
            raise ConfigError("--verbose and --quiet exclude each other; leave one of them out")
        set_verbosity(-1 if quiet else verbose)
        try:
            command(**values)
        except UcudnnError as error:
            # `main` prints the sentence below it.
            if traceback:
                err.print("".join(format_exception(error)), soft_wrap=True)
            raise

    return _with_flags(command, call, {}, _COMMON)


def _with_flags(command: Command, call: Command, first: Flags, last: Flags) -> Command:
    """`call` with the name and flags of a command, and more; typer reads a function's signature."""
    hints = get_type_hints(command, include_extras=True)
    own = {
        name: (hints[name], parameter.default)
        for name, parameter in signature(command).parameters.items()
        if name != "recipe"
    }
    flags = {**first, **own, **last}
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {name: hint for name, (hint, _) in flags.items()}
    call.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
            for name, (hint, default) in flags.items()
        ]
    )
    return call


def settings(file: Path | None, given: dict[str, Any]) -> Config:
    """Settings from a file or the environment, overridden by flags."""
    # A flag that was not given must not hide the value of the file.
    flags = {name: value for name, value in given.items() if value is not None}
    return replace(read_config(file) if file else Config(), **flags)


def passes(ops: str | None, infer: bool) -> str | None:
    """The passes to plan by --ops and --infer.

    Raises:
        ConfigError: they contradict each other.
    """
    if infer and ops not in (None, "fprop"):
        raise ConfigError(
            f"--infer plans the forward pass only, and --ops is {ops!r}; leave one out"
        )
    return "fprop" if infer else ops
