"""A convolution problem: one pass of a convolution, as a hashable value, checked when made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from ucudnn.errors import ProblemError, quoted
from ucudnn.units import TOO_LARGE

# Names as in cuDNN, in aten's order: forward, gradient of the input, gradient of the weight.
OPS = ("fprop", "dgrad", "wgrad")
LAYOUTS = ("nchw", "nhwc")
MATHS = ("strict", "tf32")
BYTES_BY_DTYPE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Problem:
    """One convolution to compute.

    >>> p = Problem("fprop", 256, 64, 192, (27, 27), (5, 5), padding=((2, 2), (2, 2)))
    >>> p.output_size, p.with_batch(32).result_shape
    ((27, 27), (32, 192, 27, 27))
    >>> print(p)
    fprop conv2d(64->192, k5, 27x27) at batch 256

    Args:
        op: "fprop" (y from x, w), "dgrad" (dx from dy, w) or "wgrad" (dw from x, dy).
        batch: samples N in x and y.
        in_channels: channels C of x.
        out_channels: channels K of y.
        input_size: spatial sizes of x, one to three of them, outermost first.
        kernel_size: spatial sizes of w.
        stride: per axis; default 1.
        padding: (begin, end) per axis; default 0.
        dilation: per axis; default 1.
        groups: number of groups; it divides both channel counts.
        dtype: "float64", "float32", "bfloat16" or "float16".
        layout: "nchw" (channels first) or "nhwc" (channels last), for any rank.
        math: "tf32" if factors of float32 products may be rounded to TF32, else "strict".

    Raises:
        ProblemError: the geometry is impossible; the message names the field and its value.
    """

    op: str
    batch: int
    in_channels: int
    out_channels: int
    input_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    dtype: str = "float32"
    layout: str = "nchw"
    math: str = "strict"

    def __post_init__(self) -> None:
        # The checks below need a tuple with one entry per axis for each size, stride, padding and
        # dilation, so these are made first.
        rank = self._normalise_sizes()
        for name, allowed in (
            ("op", OPS),
            ("dtype", tuple(BYTES_BY_DTYPE)),
            ("layout", LAYOUTS),
            ("math", MATHS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ProblemError(
                    f"{name} must be one of {', '.join(allowed)}, got {quoted(value)}"
                )
        for name in ("batch", "in_channels", "out_channels", "groups"):
            _require_positive(name, getattr(self, name))
        for name in ("input_size", "kernel_size", "stride", "dilation"):
            for value in getattr(self, name):
                _require_positive(name, value)
        self._require_channels_divide()
        for axis in range(rank):
            self._require_kernel_fits(axis)

    def _normalise_sizes(self) -> int:
        for name in ("input_size", "kernel_size", "stride", "dilation"):
            value = getattr(self, name)
            if not isinstance(value, (tuple, list)):
                raise ProblemError(
                    f"{name} must be a tuple with one int per spatial axis, got {quoted(value)}"
                )
            # Lists, as they come from JSON, are made tuples, because lists cannot be hashed. The
            # fields of a frozen dataclass can be set only by `object.__setattr__`.
            object.__setattr__(self, name, tuple(value))
        rank = len(self.input_size)
        if not 1 <= rank <= 3:
            raise ProblemError(
                f"input_size must have 1, 2 or 3 spatial axes, got {self.input_size}"
            )
        # An empty tuple stands for the default, whose length follows from `input_size`.
        object.__setattr__(self, "stride", self.stride or (1,) * rank)
        object.__setattr__(self, "dilation", self.dilation or (1,) * rank)
        object.__setattr__(self, "padding", _pairs(self.padding, rank))
        for name in ("kernel_size", "stride", "padding", "dilation"):
            if len(getattr(self, name)) != rank:
                raise ProblemError(
                    f"{name} must have one entry per spatial axis ({rank}, as input_size="
                    f"{self.input_size}), got {getattr(self, name)}"
                )
        return rank

    def _require_channels_divide(self) -> None:
        for name in ("in_channels", "out_channels"):
            if getattr(self, name) % self.groups:
                raise ProblemError(
                    f"{name} (={getattr(self, name)}) must be divisible by groups (={self.groups})"
                )

    def _require_kernel_fits(self, axis: int) -> None:
        begin, end = self.padding[axis]
        padded = self.input_size[axis] + begin + end
        extent = self.dilation[axis] * (self.kernel_size[axis] - 1) + 1
        if extent > padded:
            raise ProblemError(
                f"kernel_size must fit the padded input: on axis {axis} the dilated kernel spans "
                f"{extent} but the input is {self.input_size[axis]} + {begin} + {end} = {padded}; "
                f"enlarge input_size or padding"
            )

    @property
    def rank(self) -> int:
        """Number of spatial axes, 1 to 3."""
        return len(self.input_size)

    @property
    def output_size(self) -> tuple[int, ...]:
        """Spatial sizes of y."""
        # Rounded down, as in torch and cuDNN: input rows that do not fill a stride are not read.
        return tuple(
            (size + sum(padding) - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, padding, dilation in zip(
                self.input_size,
                self.kernel_size,
                self.stride,
                self.padding,
                self.dilation,
                strict=True,
            )
        )

    @property
    def x_shape(self) -> tuple[int, ...]:
        """Shape (N, C, *input_size) of the input."""
        return (self.batch, self.in_channels, *self.input_size)

    @property
    def w_shape(self) -> tuple[int, ...]:
        """Shape (K, C / groups, *kernel_size) of the filter."""
        return (self.out_channels, self.in_channels // self.groups, *self.kernel_size)

    @property
    def y_shape(self) -> tuple[int, ...]:
        """Shape (N, K, *output_size) of the output."""
        return (self.batch, self.out_channels, *self.output_size)

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the two operands: (x, w) for fprop, (dy, w) for dgrad, (x, dy) for wgrad."""
        return {
            "fprop": (self.x_shape, self.w_shape),
            "dgrad": (self.y_shape, self.w_shape),
            "wgrad": (self.x_shape, self.y_shape),
        }[self.op]

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the result: y for fprop, dx for dgrad, dw for wgrad."""
        return {"fprop": self.y_shape, "dgrad": self.x_shape, "wgrad": self.w_shape}[self.op]

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one element of `dtype`."""
        return BYTES_BY_DTYPE[self.dtype]

    @property
    def result_bytes(self) -> int:
        """Bytes of the result."""
        return prod(self.result_shape) * self.bytes_per_element

    @property
    def flops(self) -> int:
        """Multiplications and additions of the direct method, including those with padding."""
        # Each element of y sums up one product per element of its filter, w_shape[1:].
        return 2 * prod(self.y_shape) * prod(self.w_shape[1:])

    def with_batch(self, batch: int) -> Problem:
        """The same convolution on another number of samples.

        >>> Problem("dgrad", 8, 4, 4, (9,), (3,)).with_batch(2).batch
        2
        """
        return replace(self, batch=batch)

    def as_2d(self) -> Problem:
        """The 2-D equivalent of a 1-D problem, with a leading axis of size 1; others unchanged.

        >>> Problem("fprop", 8, 4, 4, (9,), (3,), padding=((1, 1),)).as_2d().padding
        ((0, 0), (1, 1))
        """
        if self.rank != 1:
            return self
        return replace(
            self,
            input_size=(1, *self.input_size),
            kernel_size=(1, *self.kernel_size),
            stride=(1, *self.stride),
            padding=((0, 0), *self.padding),
            dilation=(1, *self.dilation),
        )

    def __str__(self) -> str:
        # Fields with their usual values are left out, to keep the lines of tables short.
        kernel = _sizes(self.kernel_size, squeeze=True)
        extras = "".join(
            f", {name}{_sizes(value, squeeze=True)}"
            for name, value in (("s", self.stride), ("d", self.dilation))
            if set(value) != {1}
        )
        if self.groups > 1:
            extras += f", g{self.groups}"
        if self.dtype != "float32":
            extras += f", {self.dtype}"
        if self.layout != "nchw":
            extras += f", {self.layout}"
        channels = f"{self.in_channels}->{self.out_channels}"
        return (
            f"{self.op} conv{self.rank}d({channels}, k{kernel}, {_sizes(self.input_size)}{extras})"
            f" at batch {self.batch}"
        )


def strides_of(shape: tuple[int, ...], is_channels_last: bool) -> tuple[int, ...]:
    """Strides of a dense tensor of shape (N, C, *spatial), contiguous or channels-last.

    >>> strides_of((2, 3, 5), False), strides_of((2, 3, 5), True)
    ((15, 5, 1), (15, 1, 3))
    """
    axes = range(len(shape))
    outer_to_inner = (0, *axes[2:], 1) if is_channels_last else axes
    strides, step = [0] * len(shape), 1
    for axis in reversed(outer_to_inner):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def _pairs(padding: object, rank: int) -> tuple[tuple[int, int], ...]:
    if not isinstance(padding, (tuple, list)):
        raise ProblemError(f"padding must be ((begin, end), ...), got {quoted(padding)}")
    # The padding may come from a file, and its values may be of any type.
    for pair in padding:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ProblemError(
                f"padding must be one (begin, end) pair per spatial axis, got {quoted(padding)}"
            )
        for value in pair:
            if type(value) is not int or not 0 <= value < TOO_LARGE:
                raise ProblemError(
                    f"padding must hold ints of at least 0 and below 2^63, got {quoted(padding)}"
                )
    return tuple((begin, end) for begin, end in padding) or ((0, 0),) * rank


def _require_positive(name: str, value: object) -> None:
    # `isinstance` would accept True, which as a size is a mistake.
    if type(value) is not int or value < 1:
        raise ProblemError(f"{name} must be an int of at least 1, got {quoted(value)}")
    # torch, cuDNN and the cache hold sizes in 64 bits.
    if value >= TOO_LARGE:
        raise ProblemError(f"{name} must be below 2^63, got {quoted(value)}")


def _sizes(sizes: tuple[int, ...], squeeze: bool = False) -> str:
    if squeeze and len(set(sizes)) == 1:
        return str(sizes[0])
    return "x".join(map(str, sizes))
