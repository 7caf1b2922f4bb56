"""The argument MODEL of commands: make the model and its example inputs, and trace it."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ucudnn.cli.console import say_error
from ucudnn.errors import ConfigError, quoted
from ucudnn.problem import LAYOUTS
from ucudnn.system.files import parse_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ucudnn.steps.tracing import Traced

# Dtypes to which autocast can cast convolutions.
AUTOCAST_DTYPES = ("bfloat16", "float16")

# Flags for columns that a table of layers lacks. A model has its own dtype, layout and math.
_OF_TABLE = ("dtype", "memory_format", "math")


class Recipe(NamedTuple):
    """What MODEL is: a model and its inputs, or a table of layers; fields are named like flags."""

    model: str
    input: tuple[str, ...] = ()
    inputs: str | None = None
    args: str | None = None
    channels_last: bool = False
    autocast: bool = False
    autocast_dtype: str | None = None
    infer: bool = False
    real: bool = False
    dtype: str | None = None
    memory_format: str | None = None
    math: str | None = None

    def require_right(self, may_be_table: bool) -> None:
        """Refuse what can be seen to be wrong before torch is imported, which takes seconds."""
        if self.is_table and not may_be_table:
            raise ConfigError(
                f"MODEL must be a model here, and {self.model} is a table of layers, which `ucudnn "
                f"tune` and `ucudnn enumerate` take"
            )
        for name, value in zip(self._fields[1:], self[1:], strict=True):
            flag = f"--{name.replace('_', '-')}"
            # --infer is allowed, because it also chooses the passes of a table.
            if self.is_table and value and name not in ("infer", *_OF_TABLE):
                raise ConfigError(
                    f"{flag} is for a model, and {self.model} is a table of layers; leave it out"
                )
            if not self.is_table and value is not None and name in _OF_TABLE:
                raise ConfigError(
                    f"{flag} is for a table of layers, and {self.model} is a model, which has its "
                    f"own; leave it out"
                )
        if self.memory_format not in (None, *LAYOUTS):
            raise ConfigError(
                f"--memory-format must be one of {', '.join(LAYOUTS)}, got "
                f"{quoted(self.memory_format)}"
            )
        if not self.is_table:
            self._require_model()

    def _require_model(self) -> None:
        # What is wrong is told together, so that the next attempt can be right.
        wrong = list[str]()
        try:
            _split_name(self.model, "MODEL")
        except ConfigError as error:
            wrong.append(str(error))
        if bool(self.input) == (self.inputs is not None):
            wrong.append(
                f"a model needs --input with a shape such as 64x3x224x224, or else --inputs with a "
                f"function that yields inputs, for {self.model}"
            )
        if wrong:
            raise ConfigError("; and ".join(wrong))
        _parse_arguments(self.args)
        if self.autocast_dtype not in (None, *AUTOCAST_DTYPES):
            raise ConfigError(
                f"--autocast-dtype must be one of {', '.join(AUTOCAST_DTYPES)}, got "
                f"{quoted(self.autocast_dtype)}"
            )
        self.specs()
        if self.inputs is not None:
            _split_name(self.inputs, "--inputs")

    def specs(self) -> list[Spec]:
        """The inputs that --input describes."""
        return [parse_spec(text) for text in self.input]

    @property
    def is_table(self) -> bool:
        """True if MODEL is a table of layers instead of a model."""
        return self.model.endswith(".csv")


class NamedModel(NamedTuple):
    """A model that a command line names, ready to be traced and run."""

    recipe: Recipe
    module: nn.Module
    examples: list[Any]

    def fill(self) -> None:
        """Fill inputs that have no values with random values, so that steps can be run."""
        # Inputs that the user's own function (--inputs) makes have values already.
        if self.recipe.inputs is None:
            fill(self.examples)

    def trace(self, ops: tuple[str, ...], device_type: str) -> Traced:
        """Trace the convolutions of the model's step for a kind of device."""
        from ucudnn.steps.tracing import trace_layers

        if self.recipe.real:
            self.fill()
        with self.context():
            return trace_layers(
                self.module, self.examples, ops, device_type=device_type, real=self.recipe.real
            )

    def context(self) -> AbstractContextManager[object]:
        """The context in which the model is traced and run: autocast if the flags ask for it."""
        import torch

        if not self.recipe.autocast and self.recipe.autocast_dtype is None:
            return nullcontext()
        return torch.autocast("cpu", getattr(torch, self.recipe.autocast_dtype or "bfloat16"))


def name_model(recipe: Recipe) -> NamedModel:
    """Make the model that a command line describes."""
    module = load_model(recipe.model, recipe.args)
    if recipe.inputs is None:
        examples = make_examples(recipe.specs(), module)
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
    """Convert a module or nested inputs: 4-D tensors to channels_last, 5-D to channels_last_3d."""
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    from ucudnn.backends.tensors import in_channels_last

    if isinstance(what, list):
        return tree_map_only(Tensor, in_channels_last, what)
    # `Module.to` takes one memory format for all, and fails if there are both 4-D and 5-D tensors.
    for tensor in (*what.parameters(), *what.buffers()):
        tensor.data = in_channels_last(tensor.data)
    return what


def load_model(spec: str, arguments: str | None = None) -> nn.Module:
    """Call what `module:callable` or `file.py:callable` names, which must return a torch module."""
    from torch import nn

    args, kwargs = _parse_arguments(arguments)
    made = call_named(spec, "MODEL", *args, **kwargs)
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"{spec} must return a torch.nn.Module, it returned {type(made).__name__}"
        )
    return made


def _parse_arguments(text: str | None) -> tuple[list[Any], dict[str, Any]]:
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
    """Call what `module:callable` or `file.py:callable` names; if it is a made model, return it."""
    folder, name, attribute = _split_name(spec, what)
    if spec.rpartition(":")[0].endswith(".py") and _runs_on_import(folder / f"{name}.py"):
        say_error(
            f"importing {name}.py, which runs it; what it should not do now belongs below "
            f"`if __name__ == '__main__':`"
        )
    # The folder is put on the path, as Python does for a script, so that the file of the model can
    # import modules beside it.
    sys.path.insert(0, str(folder.resolve()))
    try:
        found = _imported(name, attribute, what)
        # The name may be that of a model that the file has made on import. Then the model is
        # returned. It must not be called, because that would run its forward.
        is_made = callable(getattr(found, "named_parameters", None)) and not isinstance(found, type)
        return found if is_made else found(*args, **kwargs)
    except ConfigError:
        raise
    # The user's code may raise anything, or end the process when it is imported.
    except (Exception, SystemExit) as error:
        remedy = "" if args or kwargs or what != "MODEL" else "; --args gives it arguments"
        raise ConfigError(
            f"{what} must be module:callable, called without arguments unless --args gives some; "
            f"{spec}: {type(error).__name__}: {error}{remedy}; --traceback shows where"
        ) from error
    finally:
        sys.path.pop(0)


def _split_name(spec: str, what: str) -> tuple[Path, str, str]:
    """The folder, the module and the attribute that `module:callable` names."""
    # The text is split at its last colon, because a path may contain colons.
    name, _, attribute = spec.rpartition(":")
    if not name or not attribute:
        raise ConfigError(
            f"{what} must be module:callable or file.py:callable, or a .csv of layers where the "
            f"command takes one; got {quoted(spec)}"
        )
    path = Path(name)
    if path.suffix != ".py":
        return Path(), name, attribute
    if not path.is_file():
        raise ConfigError(f"{what} must name a file that is there, and {path} is not")
    return path.parent, path.stem, attribute


def _runs_on_import(path: Path) -> bool:
    """True if a file does more than define names when it is imported."""
    body = ast.parse(path.read_bytes()).body
    calls = (one for one in body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call))
    return any(calls) or any(isinstance(one, (ast.For, ast.While, ast.With)) for one in body)


def _imported(name: str, attribute: str, what: str) -> Any:
    module = importlib.import_module(name)
    if not hasattr(module, attribute):
        raise ConfigError(
            f"{what} must name something that is there, and {module.__name__} has no "
            f"{quoted(attribute)}"
        )
    return getattr(module, attribute)


# Dtypes that an input of a model may have. Integers are allowed for layers such as embeddings.
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")
_SPEC = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?"
    r"(?P<shapes>[1-9]\d*(?:x[1-9]\d*)*(?:,[1-9]\d*(?:x[1-9]\d*)*)*)"
    r"(?::(?P<dtype>\w+))?"
)


class Spec(NamedTuple):
    """One input of a model, as --input describes it; several shapes are for several examples."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str


def parse_spec(text: str) -> Spec:
    """Read the description of an input.

    >>> parse_spec("64x3x224x224")
    Spec(name='', shapes=((64, 3, 224, 224),), dtype='float32')
    >>> parse_spec("timestep=8,4:int64")
    Spec(name='timestep', shapes=((8,), (4,)), dtype='int64')
    """
    match = _SPEC.fullmatch(text)
    dtype = (match["dtype"] or "float32") if match else ""
    if match is None or dtype not in DTYPES:
        raise ConfigError(
            f"--input must be [NAME=]SHAPE[,SHAPE ...][:DTYPE], such as 64x3x224x224 or "
            f"timestep=64:int64, with DTYPE one of {', '.join(DTYPES)}; got {quoted(text)}"
        )
    shapes = (tuple(map(int, shape.split("x"))) for shape in match["shapes"].split(","))
    return Spec(match["name"] or "", tuple(shapes), dtype)


def make_examples(specs: Iterable[Spec], module: nn.Module) -> list[Any]:
    """Make example inputs without values, for `ucudnn.trace`: a list with one example per size."""
    specs = list(specs)
    counts = {len(spec.shapes) for spec in specs} - {1}
    if len(counts) > 1:
        raise ConfigError(
            f"every --input must have one shape or as many as the others, got "
            f"{' and '.join(str(count) for count in sorted(counts))}"
        )
    return [_example(specs, module, index) for index in range(max(counts, default=1))]


def _example(specs: list[Spec], module: nn.Module, index: int) -> Any:
    args, kwargs = [], {}
    for spec in specs:
        tensor = _empty(spec.shapes[index if len(spec.shapes) > 1 else 0], spec.dtype)
        if spec.name:
            kwargs[spec.name] = tensor
        else:
            args.append(tensor)
    if not kwargs:
        return tuple(args)
    if not args:
        return kwargs
    # An example is a tuple of positional inputs or a dict of keyword inputs. If there are both, all
    # inputs are given by keyword, positional ones by the names that they have in `forward`.
    try:
        return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the model takes no such inputs: {error}; name all of them, as NAME=SHAPE"
        ) from error


def _empty(shape: tuple[int, ...], dtype: str) -> Tensor:
    import torch

    try:
        # The tensor is not filled, because tracing needs only shapes, and pages that nobody writes
        # to take no memory.
        return torch.empty(shape, dtype=getattr(torch, dtype))
    # torch's own message is replaced, because it begins with a place in torch's code.
    except RuntimeError as error:
        size = "x".join(map(str, shape))
        raise ConfigError(
            f"an input of {size} does not fit in memory, not even without values; give a smaller "
            f"one"
        ) from error


def examples_of(made: Any) -> list[Any]:
    """The example inputs that a function of the user returned or yields."""
    import torch

    if isinstance(made, (torch.Tensor, tuple, Mapping)):
        return [made]
    if not isinstance(made, (list, Iterator)):
        raise ConfigError(
            f"--inputs must name a function that returns or yields tensors, tuples of positional "
            f"inputs or dicts of keyword inputs, it returned {type(made).__name__}"
        )
    examples = list(made)
    if not examples:
        raise ConfigError("--inputs must name a function that yields at least one example input")
    return examples


def fill(examples: list[Any]) -> None:
    """Fill tensors in place: floating point with normal random numbers, others with 0 and 1.

    >>> import torch
    >>> some = {"index": torch.full((3,), 10**9)}
    >>> fill([some])
    >>> int(some["index"].max()) < 2
    True
    """
    from torch.utils._pytree import tree_leaves

    for tensor in tree_leaves(examples):
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            # Integers may be indices into a table: 0 and 1 are in the range of nearly every table.
            tensor.random_(0, 2)
