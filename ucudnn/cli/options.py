"""Options of commands: their names, their help, and the settings that they give."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from tempfile import NamedTemporaryFile
from traceback import format_exception
from types import NoneType
from typing import Annotated, Any, get_type_hints

import typer

from ucudnn.cli.console import Answer, err, set_quiet
from ucudnn.cli.models import Recipe
from ucudnn.config import SETTINGS, Config
from ucudnn.errors import ConfigError, OutputError, UcudnnError, quoted
from ucudnn.system.files import parse_json

Command = Callable[..., Answer | None]
# The type and the default of each flag, by the name of its parameter.
Flags = Mapping[str, tuple[Any, Any]]

# Titles of panels in --help. Above them is a first panel, with the flags that matter most. A flag
# with a --no-... beside it takes much room, so such flags have a panel of their own.
_MODELS, _TABLES = "More about a model", "For a CSV of layers without such columns"
_SETTINGS, _SWITCHES, _OUTPUT = "More settings", "Settings that are on or off", "Output and errors"
# Settings whose flags are in the first panel.
_FIRST = ("memory_budget", "workspace_limit", "layout", "effort", "time_budget_s")

# A file of this size is written and removed, before an output that takes minutes to make is made.
_TRIAL_BYTES = 1 << 16


def _text(meaning: str, metavar: str, *names: str, panel: str | None = None) -> Any:
    """The type of an option that takes a value; without the option its value is None."""
    return Annotated[
        str | None, typer.Option(*names, help=meaning, metavar=metavar, rich_help_panel=panel)
    ]


def _switch(names: str, meaning: str, panel: str | None = None) -> Any:
    # Without a metavar, --help would print <bool>.
    option = typer.Option(*names.split(), help=meaning, metavar="", rich_help_panel=panel)
    return Annotated[bool, option]


# Types of parameters. Commands share them, so that a flag has one meaning and one help text.
JsonOption = _switch("--json", "Print JSON for machines.", _OUTPUT)
AllOption = _switch("--all", "Print all kernels, also those that stay torch's own.", _OUTPUT)
ModelArgument = Annotated[
    str, typer.Argument(help="module:callable or file.py:callable of a model.", metavar="MODEL")
]
ModelOrTableArgument = Annotated[
    str,
    typer.Argument(help="module:callable, file.py:callable or a CSV of layers.", metavar="MODEL"),
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write the plan here.", metavar="FILE")
]
ConfigFileOption = Annotated[
    Path | None,
    typer.Option(
        "--config", help="JSON file with settings.", metavar="FILE", rich_help_panel=_SETTINGS
    ),
]
RemeasureOption = _switch("--remeasure", "Take times anew that the cache has.", _SETTINGS)
FailIfPartialOption = _switch(
    "--fail-if-partial", "Exit with 1 where kernels have no plan.", _OUTPUT
)
InputOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Each input of a model: 64x3x224x224, t=64:int64, or two sizes: 8x3x64x64,4x3x96x96.",
        metavar="SPEC",
    ),
]
InferOption = _switch("--infer", "Plan the forward pass only.")

# Flags that describe a model and its inputs; each has the name of a field of `Recipe`.
_RECIPE: dict[str, tuple[Any, Any]] = {
    "input": (InputOption, None),
    "infer": (InferOption, False),
    "channels_last": (_switch("--channels-last", "Put model and inputs in channels_last."), False),
    "autocast": (_switch("--autocast", "Run the model under bfloat16 autocast."), False),
    "autocast_dtype": (_text("Autocast to bfloat16 or float16.", "NAME", panel=_MODELS), None),
    "inputs": (
        _text(
            "Instead of --input: callable that yields tensors, tuples or dicts.",
            "CALLABLE",
            panel=_MODELS,
        ),
        None,
    ),
    "args": (_text("Arguments of MODEL: an object or a list.", "JSON", panel=_MODELS), None),
    "real": (_switch("--real", "Trace a step on real values.", _MODELS), False),
}
# Flags that describe a table of layers, as fields of `Recipe`, too. They are no settings of
# `Config`, because they are needed only for a table that lacks these columns.
_TABLE: dict[str, tuple[Any, Any]] = {
    "dtype": (_text("Such as float16; default: float32.", "NAME", panel=_TABLES), None),
    "memory_format": (_text("Column layout: nchw (default) or nhwc.", "NAME", panel=_TABLES), None),
    "math": (_text("Float32 on a GPU: tf32 (default) or strict.", "NAME", panel=_TABLES), None),
}
# The flag of commands that return an `Answer`.
_JSON: dict[str, tuple[Any, Any]] = {"as_json": (JsonOption, False)}
# Flags of all commands but `run`, `record` and `launch`, which run a script.
_COMMON: dict[str, tuple[Any, Any]] = {
    "quiet": (_switch("-q --quiet", "Show no progress.", _OUTPUT), False),
    "traceback": (_switch("--traceback", "Of an error, show where it is from.", _OUTPUT), False),
}


def flag_of(name: str) -> str:
    """The flag of a setting.

    >>> flag_of("time_budget_s")
    '--time-budget'
    """
    return f"--{name.removesuffix('_s').replace('_', '-')}"


def _of_setting(name: str) -> tuple[Any, Any]:
    """Type and default of a setting's flag; None: a file or the environment decides."""
    setting, flag = SETTINGS[name], flag_of(name)
    if setting.metavar:
        panel = None if name in _FIRST else _SETTINGS
        return _text(setting.summary, setting.metavar, flag, panel=panel), None
    names = f"{flag}/--no-{flag[2:]}"
    both = typer.Option(names, help=setting.summary, metavar="", rich_help_panel=_SWITCHES)
    return Annotated[bool | None, both], None


CacheOption = _text(SETTINGS["cache"].summary, SETTINGS["cache"].metavar)


def takes(
    argument: Any = None, names: Collection[str] = (), without: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Give a command flags of a model and of settings, and the flags in `_COMMON`.

    If the command returns an `Answer`, it gets --json, too, and the answer is printed.

    Args:
        argument: type of the argument MODEL; None: the command has no model. The command receives
            MODEL, together with the flags that describe it, as one parameter `recipe`.
        names: settings that get a flag. The command receives the values of those flags that the
            user gave as one parameter `given`.
        without: flags of a model that the command does not need.
    """
    may_be_table = argument is ModelOrTableArgument
    described = {name: flag for name, flag in _RECIPE.items() if name not in without}
    described |= _TABLE if may_be_table else {}

    def changed(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        answers = hints["return"] is not NoneType

        def call(*, quiet: bool, traceback: bool, **values: Any) -> None:
            set_quiet(quiet)
            as_json = answers and values.pop("as_json")
            if argument is not None:
                fields = {name: values.pop(name) for name in ("model", *described)}
                fields["input"] = tuple(fields["input"] or ())
                values["recipe"] = recipe = Recipe(**fields)
            if names:
                given = {name: values.pop(name) for name in names}
                values["given"] = {name: one for name, one in given.items() if one is not None}
            try:
                if argument is not None:
                    recipe.require_right(may_be_table)
                answer = command(**values)
                if answer is not None:
                    answer.tell(as_json)
            except UcudnnError as error:
                # `main` prints the sentence of the error below the traceback.
                if traceback:
                    err.print("".join(format_exception(error)), soft_wrap=True)
                raise

        own = {
            name: (hints[name], parameter.default)
            for name, parameter in signature(command).parameters.items()
            if name not in ("recipe", "given")
        }
        model = {} if argument is None else {"model": (argument, Parameter.empty), **described}
        flags = {**model, **{name: _of_setting(name) for name in names}, **own}
        return _with_flags(command, call, {**flags, **(_JSON if answers else {}), **_COMMON})

    return changed


# Gives a command the flags in `_COMMON` alone.
common = takes()


def _with_flags(command: Command, call: Command, flags: Flags) -> Command:
    """Give `call` the name of a command, and a signature with its flags, which typer reads."""
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {name: hint for name, (hint, _) in flags.items()}
    call.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
            for name, (hint, default) in flags.items()
        ]
    )
    return call


def _read_config(path: Path) -> Config:
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config must be a JSON file with settings: {path}: {error}") from error
    # Names are checked here, because the dataclass would raise a TypeError that names no file.
    odd = sorted(set(values) - set(SETTINGS)) if isinstance(values, dict) else values
    if odd or not isinstance(values, dict):
        raise ConfigError(
            f"{path} must hold an object with some of {', '.join(SETTINGS)}, got {quoted(odd)}"
        )
    try:
        # Settings that the file lacks are read from the environment.
        return Config(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def require_file(output: Path) -> None:
    """Refuse an --output that could not be written; a file that exists is left as it is.

    Raises:
        ConfigError: its folder does not exist, or it is a folder.
        OutputError: there is no room in the folder, or it is read-only.
    """
    folder = output.resolve().parent
    if output.is_dir() or not folder.is_dir():
        raise ConfigError(f"--output must be a file in a folder that exists, got {output}")
    try:
        with NamedTemporaryFile(dir=folder) as trial:
            trial.write(bytes(_TRIAL_BYTES))
            trial.flush()
    except OSError as error:
        raise OutputError(
            f"--output cannot be written to {output} ({error.strerror}); choose another path"
        ) from error


def settings(recipe: Recipe, given: Mapping[str, Any], file: Path | None = None) -> Config:
    """Settings from a file or the environment, overridden by flags."""
    if recipe.infer:
        if given.get("ops", "fprop") != "fprop":
            raise ConfigError(
                f"--infer plans the forward pass only, and --ops is {quoted(given['ops'])}; leave "
                f"one out"
            )
        given = {**given, "ops": "fprop"}
    config = _read_config(file) if file else Config()
    try:
        return replace(config, **given)
    except ConfigError as error:
        name, _, rest = str(error).partition(" ")
        if name not in given:
            raise
        raise ConfigError(f"{flag_of(name)} {rest}") from error
