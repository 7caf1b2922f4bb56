"""The check against float64: right results pass, wrong ones do not, and it costs little."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ucudnn.backends import Executable
from ucudnn.backends.torch_cpu.workspace import allocated_peak_bytes
from ucudnn.benchmark.accuracy import Check, Reference, allowed_error
from ucudnn.benchmark.protocol import Ring
from ucudnn.measurement import Role
from ucudnn.problem import OPS, Problem

MIB = 1 << 20
# A crop does not hold all of the samples, channels and positions of these.
LARGE = {
    "1d": {"input_size": (300,), "kernel_size": (5,), "padding": ((2, 2),)},
    "2d": {"input_size": (28, 31), "kernel_size": (3, 3), "padding": ((1, 1), (1, 1))},
    "2d-strided": {
        "input_size": (61, 50),
        "kernel_size": (5, 3),
        "stride": (2, 2),
        "padding": ((2, 2), (1, 1)),
    },
    "2d-dilated": {
        "input_size": (33, 35),
        "kernel_size": (3, 3),
        "dilation": (2, 3),
        "padding": ((2, 2), (3, 3)),
    },
    "2d-large-kernel": {
        "input_size": (30, 30),
        "kernel_size": (13, 13),
        "padding": ((6, 6), (6, 6)),
    },
    "3d": {
        "input_size": (13, 12, 11),
        "kernel_size": (3, 3, 3),
        "padding": ((1, 1), (1, 1), (1, 1)),
    },
}


class Returns(Executable):
    """Computes a given result, whatever the operands are."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def alone(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        del a, b, bias
        return self._result.clone()


def error_of(
    problem: Problem, a: Tensor, b: Tensor, result: Tensor, role: Role = Role.ALONE
) -> float:
    """What the check says of a result."""
    check = Check(Ring(problem, problem.batch, a, b, None), Returns(result), problem, role)
    check.run()
    return check.error(Reference(problem, a, b))


@pytest.fixture(params=LARGE.values(), ids=LARGE.keys())
def large(request: pytest.FixtureRequest) -> dict[str, object]:
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_values_are_those_of_torch_in_float64(backend, exact, geometry, op):
    for channels in ((4, 6, 1), (4, 8, 2), (6, 6, 6), (1, 3, 1)):
        for layout in ("nchw", "nhwc")[: len(geometry["input_size"])]:
            problem = Problem(op, 5, *channels[:2], groups=channels[2], layout=layout, **geometry)
            a, b = backend.operands(problem, 5)
            reference = Reference(problem, a, b)
            expected = reference.crop.pick(exact(problem, a, b))
            torch.testing.assert_close(reference.expected, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("op", OPS)
def test_operands_may_be_views(exact, op):
    problem = Problem(op, 2, 4, 6, (5, 7), (3, 3), padding=((0, 1), (1, 1)), groups=2)
    a, b = (torch.randn(2 * shape[0], *shape[1:]) for shape in problem.operand_shapes)
    a = torch.cat([torch.randn_like(a), a], dim=2)[::2, :, a.shape[2] :]
    b = b[::2].transpose(2, 3).contiguous().transpose(2, 3)
    reference = Reference(problem, a, b)
    expected = reference.crop.pick(exact(problem, a, b))
    torch.testing.assert_close(reference.expected, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1.01), ("bfloat16", -1.0)])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.slow
def test_a_wrong_region_is_seen_wherever_it_lies(backend, exact, large, op, dtype, factor):
    """The first, a middle and the last sample, filter, channel, row, column, plane and tap."""
    problem = Problem(op, 7, 6, 8, groups=2, dtype=dtype, **large)
    a, b = backend.operands(problem, 7)
    right = exact(problem, a, b).to(a.dtype)
    for role in (Role.ALONE, Role.LATER):
        assert error_of(problem, a, b, right, role) < torch.finfo(a.dtype).eps
    for axis, extent in enumerate(right.shape):
        for index in {0, extent // 2, extent - 1}:
            wrong = right.clone()
            wrong.select(axis, index).mul_(factor)
            for role in (Role.ALONE, Role.LATER):
                assert error_of(problem, a, b, wrong, role) > allowed_error(problem), (axis, index)


def without(tensor: Tensor, axis: int, index: int) -> Tensor:
    """A tensor that is zero at an index."""
    changed = tensor.clone()
    changed.select(axis, index).zero_()
    return changed


# Convolutions that are wrong everywhere, or at the border alone.
WRONG = {
    "ignores the first sample": lambda e, p, a, b: e(p, without(a, 0, 0), b),
    "ignores the last sample": lambda e, p, a, b: e(p, without(a, 0, -1), b),
    "ignores the first row": lambda e, p, a, b: e(p, without(a, 2, 0), b),
    "ignores the last row": lambda e, p, a, b: e(p, without(a, 2, -1), b),
    "ignores the last column": lambda e, p, a, b: e(p, without(a, -1, -1), b),
    "ignores the last channel": lambda e, p, a, b: e(p, without(a, 1, -1), b),
    "takes the channels of another group": lambda e, p, a, b: e(
        p, a.roll(a.shape[1] // p.groups, 1), b
    ),
    "flips the kernel": lambda e, p, a, b: (
        e(p, a, b).flip(2) if p.op == "wgrad" else e(p, a, b.flip(2))
    ),
    "pads by one at the other end": lambda e, p, a, b: e(
        replace(p, padding=((p.padding[0][0] + 1, p.padding[0][1] - 1), *p.padding[1:])), a, b
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("op", OPS)
def test_a_wrong_convolution_is_seen(backend, exact, large, op, name):
    problem = Problem(op, 7, 6, 8, groups=2, **large)
    a, b = backend.operands(problem, 7)
    wrong, right = WRONG[name](exact, problem, a, b), exact(problem, a, b)
    assert (wrong - right).norm() > allowed_error(problem) * right.norm()
    assert error_of(problem, a, b, wrong.float()) > allowed_error(problem)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("op", OPS)
def test_one_element_that_is_not_finite_is_seen_outside_of_the_crop(
    backend, exact, op, dtype, value
):
    problem = Problem(op, 5, 8, 8, (40, 40), (13, 13), dtype=dtype)
    a, b = backend.operands(problem, 5)
    result = exact(problem, a, b).to(a.dtype)
    before = Reference(problem, a, b).crop.pick(result)
    result[1, 1, 4, 4] = value
    assert torch.equal(Reference(problem, a, b).crop.pick(result), before)
    for role in (Role.ALONE, Role.LATER):
        assert error_of(problem, a, b, result, role) == float("inf")


@pytest.mark.parametrize("axis", [0, 1])
def test_a_filter_or_channel_of_a_gradient_that_nothing_is_added_to_is_seen(backend, exact, axis):
    problem = Problem("wgrad", 5, 8, 8, (9, 9), (3, 3))
    a, b = backend.operands(problem, 5)
    result = without(exact(problem, a, b).float(), axis, 2)
    assert error_of(problem, a, b, result, Role.LATER) == float("inf")


def test_a_gradient_that_is_zero_may_stay_as_it_is():
    """The only output of a strided convolution lies in the padding."""
    problem = Problem("wgrad", 2, 2, 2, (1,), (1,), stride=(9,), padding=((3, 3),))
    a, b = (torch.randn(shape) for shape in problem.operand_shapes)
    assert error_of(problem, a, b, torch.zeros(problem.w_shape), Role.LATER) == 0.0


def shapes_of(problem: Problem) -> tuple[Tensor, Tensor]:
    """Operands without memory."""
    a, b = (torch.ones(()).expand(shape) for shape in problem.operand_shapes)
    return a, b


@pytest.mark.parametrize("op", OPS)
def test_a_large_volume_takes_little_memory(op):
    size = (64,) * 3 if op == "wgrad" else (128,) * 3  # whose gradient takes seconds
    problem = Problem(op, 2, 64, 32, size, (3,) * 3, padding=((1, 1),) * 3)
    a, b = shapes_of(problem)

    def compute() -> None:
        Reference(problem, a, b)

    assert allocated_peak_bytes(compute) < 64 * MIB


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write."""

    moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            leaves = tree_leaves((args, kwargs, result))
            self.moved += sum(leaf.nbytes for leaf in leaves if torch.is_tensor(leaf))
        return result


@pytest.mark.parametrize(
    ("channels", "size", "kernel", "stride"),
    [((3, 64), 224, 7, 2), ((64, 64), 56, 3, 1), ((256, 64), 56, 1, 1)],
)
def test_it_moves_less_than_eight_times_what_the_kernel_must(channels, size, kernel, stride):
    """The largest weight gradients of ResNet-50; both grow with the batch alike."""
    sides = (kernel // 2,) * 2
    problem = Problem(
        *("wgrad", 64, *channels, (size,) * 2, (kernel,) * 2, (stride,) * 2), padding=(sides,) * 2
    )
    a, b = shapes_of(problem)
    with Traffic() as traffic:
        Reference(problem, a, b)
    assert traffic.moved < 8 * (a.nbytes + b.nbytes)
