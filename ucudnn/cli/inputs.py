"""Example inputs of a model, as a command line or a function of the user describes them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ucudnn.errors import ConfigError, quoted

if TYPE_CHECKING:
    from torch import Tensor, nn

# Those that a model may take; convolutions themselves are of floating point.
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")
_SPEC = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?"
    r"(?P<shapes>[1-9]\d*(?:x[1-9]\d*)*(?:,[1-9]\d*(?:x[1-9]\d*)*)*)"
    r"(?::(?P<dtype>\w+))?"
)


class Spec(NamedTuple):
    """One input of a model.

    Args:
        name: of a keyword input; "" for a positional one.
        shapes: one, or one for each of several examples.
        dtype: of its elements.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str


def parse_spec(text: str) -> Spec:
    """Read the description of an input.

    >>> parse_spec("64x3x224x224")
    Spec(name='', shapes=((64, 3, 224, 224),), dtype='float32')
    >>> parse_spec("timestep=8,4:int64")
    Spec(name='timestep', shapes=((8,), (4,)), dtype='int64')

    Raises:
        ConfigError: it is not [NAME=]SHAPE[,SHAPE ...][:DTYPE].
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
    """Example inputs without values, as `ucudnn.trace` takes them: a list of one per size.

    Args:
        specs: of all inputs; those with one shape have it in every example.
        module: that they are for, which knows the names of its inputs.

    Raises:
        ConfigError: inputs have different numbers of shapes, or do not fit in memory.
    """
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
    # An example is positional or by keyword: positional ones get the names that forward gives them.
    try:
        return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the model takes no such inputs: {error}; name all of them, as NAME=SHAPE"
        ) from error


def _empty(shape: tuple[int, ...], dtype: str) -> Tensor:
    import torch

    try:
        # Not filled: tracing needs shapes only, and pages that nobody writes to take no memory.
        return torch.empty(shape, dtype=getattr(torch, dtype))
    # torch says how many bytes it could not have, in a line that begins with the place in its code.
    except RuntimeError as error:
        size = "x".join(map(str, shape))
        raise ConfigError(
            f"an input of {size} does not fit in memory, not even without values; give a smaller "
            f"one"
        ) from error


def examples_of(made: Any) -> list[Any]:
    """The example inputs that a function of the user returned or yields.

    Raises:
        ConfigError: there is none.
    """
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
    """Give tensors values that a step can be computed with.

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
            # Indices into whatever table: each has these two.
            tensor.random_(0, 2)
