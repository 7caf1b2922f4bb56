"""A problem as cuDNN's operation graph: layouts of its tensors, and the operations on them."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from ucudnn.backends.cudnn.api import Cudnn, Descriptor, Handle
from ucudnn.backends.cudnn.constants import (
    Attribute,
    ConvolutionMode,
    DataType,
    DescriptorKind,
    PointwiseMode,
    Type,
)
from ucudnn.errors import UnsupportedError
from ucudnn.problem import Problem, strides_of

ALIGNMENT_BYTES = 16  # the most that any engine asks for
# The limit of 32-bit indices. cuDNN also lists engines for larger tensors, but none of those
# engines was tested on a device.
MOST_ELEMENTS = 2**31 - 1
# A variant pack refers to tensors by these numbers, which only have to be distinct.
X_UID, W_UID, Y_UID, BIAS_UID, _SUM_UID = 1, 2, 3, 4, 5
_DATA_TYPES = {
    "float64": DataType.DOUBLE,
    "float32": DataType.FLOAT,
    "bfloat16": DataType.BFLOAT16,
    "float16": DataType.HALF,
}


# cuDNN numbers the same attributes differently in each of the three operations. For each op: the
# end of its descriptor's name, the prefix of its attributes' names, and the names of the attributes
# for x, w and y.
_NAMES = {
    "fprop": ("FORWARD", "FORWARD", ("X", "W", "Y")),
    "dgrad": ("BACKWARD_DATA", "BWD_DATA", ("DX", "W", "DY")),
    "wgrad": ("BACKWARD_FILTER", "BWD_FILTER", ("X", "DW", "DY")),
}


@dataclass(frozen=True, slots=True)
class Target:
    """The device to plan for: a device of this machine, or a device that a profile describes."""

    cudnn: Cudnn
    handle: Handle | None = None  # set for a device of this machine
    device: Descriptor | None = None  # device properties, set for a device from a profile


class View(NamedTuple):
    """Layout of a tensor in memory."""

    strides: tuple[int, ...]  # in elements, in the order (N, C, *spatial)
    alignment_bytes: int = ALIGNMENT_BYTES  # the address is a multiple of this


class Views(NamedTuple):
    """Layouts of the three tensors of a problem in memory."""

    x: View
    w: View
    y: View


def views_of(problem: Problem, whole: Problem | None = None) -> Views:
    """Layouts of the tensors of a micro-batch, or of a slab if the whole problem is given, too.

    A micro-batch begins at a multiple of its own size in the whole tensor, and a slab begins at any
    row. Where a view may begin determines its alignment.

    >>> views_of(Problem("fprop", 2, 3, 8, (5, 5), (3, 3))).x
    View(strides=(75, 25, 5, 1), alignment_bytes=8)
    """
    # A slab has the strides of the whole tensors that it is a view of.
    of = whole or problem
    shapes, is_last = (of.x_shape, of.w_shape, of.y_shape), of.layout == "nhwc"
    x, w, y = (strides_of(shape, is_last) for shape in shapes)

    def view(strides: tuple[int, ...]) -> View:
        # A view may begin at any multiple of these offsets. torch aligns the whole tensor, so every
        # view is aligned to their greatest common divisor.
        offsets = [problem.batch * strides[0], *([strides[0], strides[2]] if whole else [])]
        alignment = gcd(ALIGNMENT_BYTES, *(problem.bytes_per_element * count for count in offsets))
        return View(strides, alignment)

    return Views(view(x), View(w), view(y))


def graph_of(
    target: Target,
    problem: Problem,
    views: Views | None = None,
    *,
    bias: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Descriptor:
    """Describe a problem: alpha * convolution + beta * (old result), or convolution + bias.

    Only fprop, with alpha 1 and beta 0, can add a bias.
    """
    views = views or views_of(problem)
    if problem.rank == 1:
        problem, views = problem.as_2d(), _views_as_2d(problem, views)
    shapes = (problem.x_shape, problem.w_shape, problem.y_shape)
    for name, shape, view in zip(Views._fields, shapes, views, strict=True):
        _require_small(problem, name, shape, view)
    cudnn, dtype = target.cudnn, _DATA_TYPES[problem.dtype]
    x = cudnn.tensor(X_UID, dtype, problem.x_shape, *views.x)
    w = cudnn.tensor(W_UID, dtype, problem.w_shape, *views.w)
    y = cudnn.tensor(Y_UID, dtype, problem.y_shape, *views.y)
    operations = []
    if bias:
        # The tensor between the convolution and the addition has at least float32, because cuDNN
        # has no precompiled engines for a narrower one.
        total = cudnn.tensor(
            _SUM_UID, _arithmetic(problem), problem.y_shape, *views.y, virtual=True
        )
        operations.append(_bias_addition(cudnn, problem, total, y))
        # The convolution writes `total`, which the addition reads; the addition writes y.
        y = total
    operations.insert(0, _convolution(cudnn, problem, (x, w, y), alpha, beta))
    graph = Descriptor(cudnn, DescriptorKind.OPERATIONGRAPH)
    graph.set_descriptors(Attribute.OPERATIONGRAPH_OPS, *operations)
    if target.handle is not None:
        graph.set_handle(Attribute.OPERATIONGRAPH_HANDLE, target.handle)
    return graph.finalize()


def _require_small(problem: Problem, name: str, shape: tuple[int, ...], view: View) -> None:
    # The distance from the first to the last element counts, because a strided view spans more
    # memory than it has elements.
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, view.strides, strict=True))
    if span > MOST_ELEMENTS:
        raise UnsupportedError(
            f"a tensor for cuDNN spans at most {MOST_ELEMENTS} elements, {name} of {problem} "
            f"spans {span}; use a smaller batch"
        )


def _views_as_2d(problem: Problem, views: Views) -> Views:
    """2-D views of the tensors of a 1-D problem: cuDNN takes no tensor of three dimensions."""

    def lifted(view: View) -> View:
        batch, channel, width = view.strides
        # An axis of size 1 may have any stride. cuDNN derives the layout from the strides, so the
        # height gets the stride that the layout would give it.
        height = channel if problem.layout == "nchw" else batch
        return View((batch, channel, height, width), view.alignment_bytes)

    return Views(lifted(views.x), lifted(views.w), lifted(views.y))


def _arithmetic(problem: Problem) -> DataType:
    # Half precision is accumulated in float32, as PyTorch does.
    return DataType.DOUBLE if problem.dtype == "float64" else DataType.FLOAT


def _convolution(
    cudnn: Cudnn,
    problem: Problem,
    tensors: tuple[Descriptor, Descriptor, Descriptor],
    alpha: float,
    beta: float,
) -> Descriptor:
    arithmetic = _arithmetic(problem)
    convolution = Descriptor(cudnn, DescriptorKind.CONVOLUTION)
    convolution.set_enum(Attribute.CONVOLUTION_COMP_TYPE, Type.DATA_TYPE, arithmetic)
    convolution.set_enum(
        Attribute.CONVOLUTION_CONV_MODE, Type.CONVOLUTION_MODE, ConvolutionMode.CROSS_CORRELATION
    )
    begins, ends = zip(*problem.padding, strict=True)
    convolution.set_int64(Attribute.CONVOLUTION_SPATIAL_DIMS, problem.rank)
    convolution.set_int64(Attribute.CONVOLUTION_PRE_PADDINGS, *begins)
    convolution.set_int64(Attribute.CONVOLUTION_POST_PADDINGS, *ends)
    convolution.set_int64(Attribute.CONVOLUTION_FILTER_STRIDES, *problem.stride)
    convolution.set_int64(Attribute.CONVOLUTION_DILATIONS, *problem.dilation)
    kind, prefix, names = _NAMES[problem.op]
    operation = Descriptor(cudnn, DescriptorKind[f"OPERATION_CONVOLUTION_{kind}"])

    def attribute(name: str) -> Attribute:
        return Attribute[f"OPERATION_CONVOLUTION_{prefix}_{name}"]

    operation.set_descriptors(attribute("CONV_DESC"), convolution.finalize())
    for name, tensor in zip(names, tensors, strict=True):
        operation.set_descriptors(attribute(name), tensor)
    # The factors have the type of the arithmetic, not that of the tensors.
    for name, factor in (("ALPHA", alpha), ("BETA", beta)):
        operation.set_float(attribute(name), factor, double=arithmetic is DataType.DOUBLE)
    return operation.finalize()


def _bias_addition(cudnn: Cudnn, problem: Problem, total: Descriptor, y: Descriptor) -> Descriptor:
    # Sizes of 1 broadcast: one element per channel.
    shape = (1, problem.out_channels, *(1,) * problem.rank)
    bias = cudnn.tensor(
        BIAS_UID,
        _DATA_TYPES[problem.dtype],
        shape,
        strides_of(shape, problem.layout == "nhwc"),
        ALIGNMENT_BYTES,
    )
    addition = Descriptor(cudnn, DescriptorKind.POINTWISE)
    addition.set_enum(Attribute.POINTWISE_MODE, Type.POINTWISE_MODE, PointwiseMode.ADD)
    addition.set_enum(Attribute.POINTWISE_MATH_PREC, Type.DATA_TYPE, _arithmetic(problem))
    operation = Descriptor(cudnn, DescriptorKind.OPERATION_POINTWISE)
    operation.set_descriptors(Attribute.OPERATION_POINTWISE_PW_DESCRIPTOR, addition.finalize())
    operation.set_descriptors(Attribute.OPERATION_POINTWISE_XDESC, total)
    operation.set_descriptors(Attribute.OPERATION_POINTWISE_BDESC, bias)
    operation.set_descriptors(Attribute.OPERATION_POINTWISE_YDESC, y)
    return operation.finalize()
