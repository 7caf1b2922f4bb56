"""Arguments of commands: a model with its inputs, a file with settings."""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ucudnn.cli.inputs import examples_of, fill, make_examples, parse_spec
from ucudnn.config import SETTINGS, Config
from ucudnn.errors import ConfigError, quoted
from ucudnn.system.files import parse_json

if TYPE_CHECKING:
    from torch import nn

    from ucudnn.tracing import Traced

# Those to which autocast casts convolutions.
AUTOCAST_DTYPES = ("bfloat16", "float16")


def read_config(path: Path) -> Config:
    """Read settings from a JSON file whose names are the fields of `Config`.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config must be a JSON file with settings: {path}: {error}") from error
    # Names are checked here, because the dataclass would raise a TypeError that names no file.
    if not isinstance(values, dict) or not set(values) <= set(SETTINGS):
        raise ConfigError(f"{path} must hold an object with some of {', '.join(SETTINGS)}")
    # Fields that the file lacks take the environment's values.
    return Config(**values)


class Recipe(NamedTuple):
    """Description of a model and its inputs on a command line; all commands have these flags.

    Args:
        model: `module:callable` or `file.py:callable`, or a module there.
        input: descriptions of inputs, such as "64x3x224x224".
        inputs: `module:callable` of a function that returns or yields example inputs.
        args: JSON: an object of keyword arguments, or a list of positional ones, for the callable.
        channels_last: convert the model and its inputs to channels-last.
        autocast: run it under autocast, to bfloat16 unless `autocast_dtype` is given.
        autocast_dtype: run it under autocast to this dtype.
        infer: without gradients, in evaluation mode.
        real: compute a step to find the convolutions.
    """

    model: str
    input: tuple[str, ...] = ()
    inputs: str | None = None
    args: str | None = None
    channels_last: bool = False
    autocast: bool = False
    autocast_dtype: str | None = None
    infer: bool = False
    real: bool = False

    def require_table(self) -> None:
        """Refuse the flags that only a model has.

        Raises:
            ConfigError: one of them is given.
        """
        for name, value in zip(self._fields[1:], self[1:], strict=True):
            # The passes of a table can be those of inference.
            if value and name != "infer":
                raise ConfigError(
                    f"--{name.replace('_', '-')} is for a model, and {self.model} is a table of "
                    f"layers; leave it out"
                )

    @property
    def is_table(self) -> bool:
        """True for a table of layers, which has no model."""
        return self.model.endswith(".csv")


class NamedModel(NamedTuple):
    """A model that a command line names, ready to be traced and run.

    Args:
        recipe: by which it was made.
        module: in the layout and mode asked for.
        examples: example inputs; their memory is allocated by `fill`.
    """

    recipe: Recipe
    module: nn.Module
    examples: list[Any]

    def fill(self) -> None:
        """Give inputs without values random ones, for running steps."""
        # Those of the user's own function have values.
        if self.recipe.inputs is None:
            fill(self.examples)

    def trace(self, ops: tuple[str, ...], device_type: str) -> Traced:
        """The convolutions of its step, on a kind of device."""
        from ucudnn.tracing import trace_layers

        if self.recipe.real:
            self.fill()
        with self.context():
            return trace_layers(
                self.module, self.examples, ops, device_type=device_type, real=self.recipe.real
            )

    def context(self) -> AbstractContextManager[object]:
        """Context in which it is traced and run."""
        import torch

        if not self.recipe.autocast and self.recipe.autocast_dtype is None:
            return nullcontext()
        return torch.autocast("cpu", getattr(torch, self.recipe.autocast_dtype or "bfloat16"))


def name_model(recipe: Recipe) -> NamedModel:
    """Make the model that a command line describes.

    Raises:
        ConfigError: there is no such model, no input of it, or no such dtype for autocast.
    """
    if recipe.autocast_dtype not in (None, *AUTOCAST_DTYPES):
        raise ConfigError(
            f"--autocast-dtype must be one of {', '.join(AUTOCAST_DTYPES)}, got "
            f"{quoted(recipe.autocast_dtype)}"
        )
    if bool(recipe.input) == (recipe.inputs is not None):
        raise ConfigError(
            f"a model needs --input with a shape such as 64x3x224x224, or else --inputs with a "
            f"function that yields inputs, for {recipe.model}"
        )
    specs = [parse_spec(text) for text in recipe.input]
    module = load_model(recipe.model, recipe.args)
    if recipe.inputs is None:
        examples = make_examples(specs, module)
    else:
        examples = examples_of(call_named(recipe.inputs, "--inputs"))
    if recipe.channels_last:
        module = in_layout(module)
        examples = in_layout(examples)
    if recipe.infer:
        # Without gradients the trace finds no backward pass.
        module = module.eval().requires_grad_(False)
    return NamedModel(recipe, module, examples)


def in_layout(what: Any) -> Any:
    """A module, or nested inputs, in channels-last: 4-D and 5-D tensors each in their own."""
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    from ucudnn.backends.tensors import in_channels_last

    if isinstance(what, list):
        return tree_map_only(Tensor, in_channels_last, what)
    # Not `Module.to`, which takes one memory format and fails at tensors of the other rank.
    for tensor in (*what.parameters(), *what.buffers()):
        tensor.data = in_channels_last(tensor.data)
    return what


def load_model(spec: str, arguments: str | None = None) -> nn.Module:
    """Call what `module:callable` or `file.py:callable` names, which must return a torch module.

    Args:
        spec: the name; a module that is there already is taken as it is.
        arguments: JSON of a list or an object; None: it is called without arguments.

    Raises:
        ConfigError: there is none, it needs other arguments, or it returns something else.
    """
    from torch import nn

    args, kwargs = _parsed_arguments(arguments)
    made = call_named(spec, "MODEL", *args, **kwargs)
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"{spec} must return a torch.nn.Module, it returned {type(made).__name__}"
        )
    return made


def _parsed_arguments(text: str | None) -> tuple[list[Any], dict[str, Any]]:
    try:
        values = parse_json(text) if text is not None else {}
    except ValueError as error:
        raise ConfigError(f"--args must be JSON, got {quoted(text)}: {error}") from error
    if isinstance(values, dict):
        return [], values
    if isinstance(values, list):
        return values, {}
    raise ConfigError(f"--args must be a JSON object or list, got {quoted(text)}")


def call_named(spec: str, what: str, *args: Any, **kwargs: Any) -> Any:
    """Call what `module:callable` or `file.py:callable` names.

    Args:
        spec: the name.
        what: the argument of the command line that it stands in.
        args: for the callable.
        kwargs: likewise.

    Raises:
        ConfigError: there is none, or it raises something.
    """
    # The last colon, as a path may contain others.
    name, _, attribute = spec.rpartition(":")
    if not name or not attribute:
        raise ConfigError(
            f"{what} must be module:callable or file.py:callable, or a .csv of layers where the "
            f"command takes one; got {quoted(spec)}"
        )
    path, folder = Path(name), Path()
    if path.suffix == ".py":
        folder, name = path.parent, path.stem
    # As Python does for a script, so that the model's file can import its neighbours.
    sys.path.insert(0, str(folder.resolve()))
    try:
        found: Any = getattr(importlib.import_module(name), attribute)
        # A model that was made when its file was imported is not called, which would compute it.
        is_made = callable(getattr(found, "named_parameters", None)) and not isinstance(found, type)
        return found if is_made else found(*args, **kwargs)
    # The user's code may raise anything, or end the process when it is imported.
    except (Exception, SystemExit) as error:
        remedy = "" if args or kwargs or what != "MODEL" else "; --args gives it arguments"
        raise ConfigError(
            f"{what} must be module:callable, called without arguments unless --args gives some; "
            f"{spec}: {type(error).__name__}: {error}{remedy}; --traceback shows where"
        ) from error
    finally:
        sys.path.pop(0)
