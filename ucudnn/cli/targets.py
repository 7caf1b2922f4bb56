"""Arguments of commands: a model, the shapes of its inputs, a file with settings."""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ucudnn.config import Config
from ucudnn.errors import ConfigError
from ucudnn.system.files import parse_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ucudnn.tracing import Traced


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
    known = {item.name for item in fields(Config)}
    if not isinstance(values, dict) or not set(values) <= known:
        raise ConfigError(f"{path} must hold an object with some of {', '.join(sorted(known))}")
    # Fields that the file lacks take the environment's values.
    return Config(**values)


class NamedModel(NamedTuple):
    """A model that a command line names, ready to be traced and run.

    Args:
        module: in the layout and mode asked for.
        inputs: one per positional input; their memory is allocated by `fill`.
        autocast: to trace and run it under bfloat16 autocast.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    autocast: bool

    def fill(self) -> None:
        """Give the inputs random values, for running steps."""
        for tensor in self.inputs:
            tensor.normal_()

    def trace(self, ops: tuple[str, ...], device_type: str) -> Traced:
        """The convolutions of its step, on a kind of device."""
        from ucudnn.tracing import trace_layers

        with self.context():
            return trace_layers(self.module, self.inputs, ops, device_type=device_type)

    def context(self) -> AbstractContextManager[object]:
        """Context in which it is traced and run."""
        import torch

        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()


def name_model(
    model: str, inputs: list[str], channels_last: bool, autocast: bool, infer: bool
) -> NamedModel:
    """Make the model of a name.

    Args:
        model: `module:callable` or `file.py:callable`.
        inputs: shapes such as "64x3x224x224", one per positional input.
        channels_last: convert the model and its inputs to channels-last.
        autocast: run it under bfloat16 autocast.
        infer: run it without gradients, in evaluation mode.

    Raises:
        ConfigError: there is no such model.
    """
    import torch

    if not inputs:
        raise ConfigError(f"a model needs --input with a shape such as 64x3x224x224, for {model}")
    # Not filled: tracing needs shapes only, and pages that nobody writes to take no memory.
    tensors = tuple(torch.empty(parse_shape(text)) for text in inputs)
    module = load_model(model)
    if channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        tensors = tuple(
            # torch defines this memory format for tensors of four axes only.
            tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
            for tensor in tensors
        )
    if infer:
        # Without gradients the trace finds no backward pass.
        module = module.eval().requires_grad_(False)
    return NamedModel(module, tensors, autocast)


def parse_shape(text: str) -> tuple[int, ...]:
    """Read the shape of an input.

    >>> parse_shape("64x3x224x224")
    (64, 3, 224, 224)

    Raises:
        ConfigError: the text is not three to five positive integers joined by x.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2,4}", text):
        raise ConfigError(
            f"--input must be batch x channels x sizes, such as 64x3x224x224, got {text!r}"
        )
    return tuple(map(int, text.split("x")))


def load_model(spec: str) -> nn.Module:
    """Call what `module:callable` or `file.py:callable` names, which must return a torch module.

    Raises:
        ConfigError: there is none, it needs arguments, or it returns something else.
    """
    from torch import nn

    # The last colon, as a path may contain others.
    name, _, attribute = spec.rpartition(":")
    path = Path(name)
    folder = Path()
    if path.suffix == ".py":
        folder, name = path.parent, path.stem
    # As Python does for a script, so that the model's file can import its neighbours.
    sys.path.insert(0, str(folder.resolve()))
    try:
        made: Any = getattr(importlib.import_module(name), attribute)()
    # The user's code may raise anything, or end the process when it is imported.
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"MODEL must be module:callable, called without arguments, or a .csv of layers; "
            f"{spec}: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.pop(0)
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"{spec} must return a torch.nn.Module, it returned {type(made).__name__}"
        )
    return made
