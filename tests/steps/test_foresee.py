"""What is foreseen of steps, against real ones: peaks by torch's profiler, batches by trial."""

from __future__ import annotations

import copy
import gc
import random
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from by_hand import in_chunks, where_it_can
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ucudnn
from ucudnn import Config
from ucudnn.backends import open_backend
from ucudnn.benchmark.failures import is_out_of_memory
from ucudnn.benchmark.operators import OperatorTable
from ucudnn.errors import ConfigError
from ucudnn.plan import Plan
from ucudnn.segment import WHOLE, Segment, StepDivision
from ucudnn.steps.advise import largest_batches
from ucudnn.steps.foresee import OPTIMIZERS, Foreseer, largest_batch
from ucudnn.steps.profile import bytes_of
from ucudnn.steps.run import Steps, gradient_mode, run_step
from ucudnn.steps.tracing import trace_layers

MIB = 1 << 20
# Frees 1.25 GiB that malloc keeps, and tells whether a tensor lies there, and whether results do
# when their operator is timed.
AFTER_A_STEP = """
import torch
from ucudnn.backends import open_backend
from ucudnn.benchmark.operators import operators_of

MIB, found = 1 << 20, []
torch.empty(31 * MIB, dtype=torch.uint8)  # from now on smaller ones are kept
tensors = [torch.empty(20 * MIB, dtype=torch.uint8) for _ in range(64)]
last = torch.ones(MIB, dtype=torch.uint8)
freed = [range(one.data_ptr(), one.data_ptr() + one.numel()) for one in tensors]
del tensors

def operator(x):
    result = torch.empty(40 * MIB, dtype=torch.uint8)
    found.append(result.data_ptr())
    return result

operator(None)
operators_of(open_backend("torch_cpu")).inside(operator, (last[:1],), {}, "", None, lambda _: False)
print(*(any(one in each for each in freed) for one in found))
"""
# The same where an operator has no memory but these; prints why it was not timed. Another
# one was timed before, and what it keeps may lie anywhere between larger pieces.
WITHOUT_OTHER_MEMORY = (
    AFTER_A_STEP.partition("operator(None)")[0]
    + """
import resource
table = operators_of(open_backend("torch_cpu"))
small = []
table.inside(
    lambda x: small.extend(torch.ones(n) for n in range(1000)) or x, (last[:1],), {}, "", None,
    lambda _: False,
)
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 16 * MIB,) * 2)
print(table.inside(operator, (last[:1],), {}, "", None, lambda _: False).failure)
"""
)


@pytest.fixture(autouse=True)
def _settings(one_thread):
    torch.manual_seed(0)


def foreseer(model: nn.Module, inputs: Any, is_training: bool = True) -> Foreseer:
    return Foreseer(model, inputs, open_backend("torch_cpu"), is_training)


def real_bytes(
    model: nn.Module,
    inputs: Any,
    division: StepDivision = WHOLE,
    memory_format: str = "keep",
    plan: Plan | None = None,
    is_training: bool = True,
) -> int:
    """Bytes that a real step allocates at most, by torch's profiler, above what it begins with."""
    backend = open_backend("torch_cpu")
    steps = Steps(model, inputs, is_training, memory_format, division)
    follows = nullcontext() if plan is None else ucudnn.installed(plan)
    with follows, gradient_mode(is_training), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps()  # looks up what is kept for later steps
        gc.collect()
        # What lies in cycles of references is freed by chance.
        gc.disable()
        try:
            span = backend.span(steps)
        finally:
            gc.enable()
    return span.peak_bytes


def near(size: int) -> Any:
    return pytest.approx(size, rel=1e-3)


def conv(a: int, b: int, rank: int = 2, **more: Any) -> nn.Module:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    return kind(a, b, 3, **{"padding": 1, **more})


class Residual(nn.Module):
    """Its argument has several users, whose gradients autograd adds, in place where it can."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.beside = (
            nn.GroupNorm(2, width),
            conv(width, width),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(x))
        return x + self.inner(y) + self.beside(y) + x.sin()


class Attention(nn.Module):
    """A layer of a transformer, on the pixels of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = conv(3, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.first(x).flatten(2).transpose(1, 2))


class Autocast(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(x)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(conv(8, 8), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.first, self.use_reentrant = conv(3, 8), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for one in self.blocks:
            x = checkpoint(one, x, use_reentrant=self.use_reentrant)
        return x


class Reading(nn.Module):
    """Forward reads a number of a tensor, which decides how often a layer is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = conv(3, 3)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(self.count.item())):
            x = torch.tanh(self.layer(x))
        return x


class Supervised(nn.Module):
    """A model that keeps results in a list, as those with deep supervision do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Sequential(conv(3, 8)), nn.Sequential(conv(8, 8)))
        self.heads = [torch.zeros(1)] * 2

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = self.heads[number] = layer(x)
        return torch.cat(self.heads)


def twice() -> nn.Module:
    layer = conv(8, 8)
    return nn.Sequential(conv(3, 8), layer, nn.Tanh(), layer)


def in_place() -> nn.Module:
    layers = (nn.BatchNorm2d(8), nn.ReLU(inplace=True), conv(8, 8), nn.Hardtanh(inplace=True))
    return nn.Sequential(conv(3, 8), *layers, nn.LeakyReLU(0.1, inplace=True))


def in_place_after_dropout() -> nn.Module:
    """Its peak is where the backward of the activation function runs."""
    layers = nn.BatchNorm2d(16), nn.Dropout(0.0), nn.ReLU(inplace=True)
    return nn.Sequential(conv(3, 16), nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1))


IMAGES, WIDE = (4, 3, 32, 32), (4, 3, 24, 24)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1-D": (lambda: nn.Sequential(conv(3, 8, 1), nn.ELU(), conv(8, 8, 1)), (4, 3, 2000)),
    "2-D, batch norm": (
        lambda: nn.Sequential(
            conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), conv(8, 16)
        ),
        IMAGES,
    ),
    "3-D, instance norm": (
        lambda: nn.Sequential(
            conv(1, 4, 3), nn.InstanceNorm3d(4), nn.PReLU(), nn.ConvTranspose3d(4, 2, 2, 2)
        ),
        (2, 1, 12, 12, 12),
    ),
    "group norm": (
        lambda: nn.Sequential(conv(3, 8), nn.GroupNorm(2, 8), nn.SiLU(), conv(8, 8, groups=4)),
        IMAGES,
    ),
    "attention": (lambda: Attention(16), (4, 3, 16, 16)),
    "weight norm": (
        lambda: nn.Sequential(
            conv(3, 8), nn.utils.parametrizations.weight_norm(conv(8, 8)), nn.Sigmoid()
        ),
        IMAGES,
    ),
    "dropout": (
        lambda: nn.Sequential(conv(3, 8), nn.Dropout(0.3), nn.Softplus(), nn.Dropout2d()),
        IMAGES,
    ),
    "in place": (in_place, IMAGES),
    "in place after dropout": (in_place_after_dropout, IMAGES),
    "residual": (lambda: nn.Sequential(conv(3, 8), Residual(8), Residual(8)), IMAGES),
    "called twice": (twice, IMAGES),
    "checkpoints": (lambda: Checkpointed(False), IMAGES),
    "reentrant checkpoints": (lambda: Checkpointed(True), IMAGES),
    "bfloat16": (
        lambda: Autocast(nn.Sequential(conv(3, 16), nn.GroupNorm(2, 16), nn.ReLU(), conv(16, 8))),
        IMAGES,
    ),
    "reads a number": (Reading, IMAGES),
    "linear": (
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(3 * 32 * 32, 64), nn.LayerNorm(64), nn.Mish(), nn.Linear(64, 9)
        ),
        IMAGES,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_the_peak_of_a_step_is_the_real_one(name):
    make, shape = NETWORKS[name]
    model, x = make(), torch.randn(shape)
    found = foreseer(model, x)
    assert found.step().own_bytes == near(real_bytes(model, x))
    assert found.step().held.total == bytes_of([*model.parameters(), *model.buffers(), x])
    model.eval()
    if name == "reentrant checkpoints":  # of which an inference has none
        return
    assert foreseer(model, x, False).step().own_bytes == near(
        real_bytes(model, x, is_training=False)
    )


def test_a_model_may_keep_results_in_a_list():
    model, x = Supervised(), torch.randn(IMAGES)
    run_step(Supervised(), x)  # looks up what is kept for later steps
    found = foreseer(model, x).step().own_bytes
    span = open_backend("torch_cpu").span(lambda: run_step(model, x))
    assert found == near(span.peak_bytes)


@pytest.mark.parametrize("name", ["2-D, batch norm", "residual", "bfloat16", "1-D"])
def test_the_peak_in_channels_last_is_the_real_one(name):
    make, shape = NETWORKS[name]
    model, x = make(), torch.randn(shape)
    found = foreseer(model, x).step(memory_format="channels_last")
    assert found.own_bytes == near(real_bytes(model, x, memory_format="channels_last"))


def divisible() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(conv(8, 8), nn.GroupNorm(2, 8), nn.SiLU(), nn.Sequential(conv(8, 8)))

    return nn.Sequential(conv(3, 8), block(), block(), block(), nn.Conv2d(8, 3, 1))


DIVISIONS = {
    "micro-batches": StepDivision((Segment("", 2),)),
    "uneven micro-batches": StepDivision((Segment("1", 5),)),
    "kept micro-batches": StepDivision((Segment("", 2, kept=2),)),
    "recomputed": StepDivision((Segment("1", None), Segment("2", None))),
    "a stretch": StepDivision((Segment("[1:4]", 4),)),
    "nested": StepDivision((Segment("", 2), Segment("2", None))),
    "nested twice": StepDivision((Segment("[1:4]", None), Segment("2", 4), Segment("2.3", None))),
    "selective": StepDivision((Segment("", None, recompute=False, selective=True),)),
    "selective and recomputed": StepDivision((Segment("", 2, kept=1, selective=True),)),
    "a loop": StepDivision(micro_batch=3),
    "a loop with segments": StepDivision((Segment("1", None), Segment("3", 2)), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVISIONS)
def test_the_peak_of_a_divided_step_is_the_real_one(name):
    model, x, division = divisible(), torch.randn(8, 3, 32, 32), DIVISIONS[name]
    found = foreseer(model, x)
    own = found.step(division, names=())
    assert own.own_bytes == near(real_bytes(model, x, division))
    assert own.own_bytes < found.step().own_bytes
    # Watching modules changes nothing.
    assert found.step(division).own_bytes == own.own_bytes


def lean(model: nn.Module, x: Tensor) -> Plan:
    backend = open_backend("torch_cpu")
    layers = trace_layers(model, x).layers
    return in_chunks(backend, layers, 2, where_it_can(backend, "im2col_gemm", 2))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["2-D, batch norm", "residual"])
def test_the_peak_by_a_plan_is_the_real_one(name, seed, random_plan):
    make, shape = NETWORKS[name]
    model, x = make(), torch.randn(shape)
    plan = random_plan(model, x, random.Random(seed)) if seed else lean(model, x)
    own, found = foreseer(model, x).step(), foreseer(model, x).step(plan=plan)
    assert found.own_bytes == near(real_bytes(model, x, plan=plan))
    assert found.own_bytes != own.own_bytes


def test_a_divided_step_by_a_plan_is_foreseen():
    model, x = divisible(), torch.randn(8, 3, 32, 32)
    division = StepDivision((Segment("1", 4), Segment("2", None)))
    plan = lean(model, x)
    found = foreseer(model, x).step(division, plan=plan)
    assert found.own_bytes == near(real_bytes(model, x, division, plan=plan))
    whole = ucudnn.foresee(model, x, replace(plan, segments=division.segments))
    assert whole.peak_bytes == found.peak_bytes


def test_several_examples_take_what_the_largest_takes():
    model = NETWORKS["group norm"][0]()
    small, large = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 32, 32)
    found = foreseer(model, [small, large]).step()
    assert found.own_bytes == near(real_bytes(model, [small, large]))
    assert found.own_bytes == near(real_bytes(model, large))
    assert found.held.others == small.nbytes + large.nbytes


def test_calls_of_convolutions_are_those_of_the_real_step():
    model, x = divisible(), torch.randn(4, 3, 16, 16)
    found = foreseer(model, x).step()
    assert found.traced == trace_layers(model, x, real=True)
    assert [one.problem for one in found.calls] == found.traced.problems


class Skipping(nn.Module):
    """Leaves out a layer in half of all steps; with `indexed` it needs real tensors, too."""

    def __init__(self, indexed: bool) -> None:
        super().__init__()
        self.indexed = indexed
        self.layer = nn.Sequential(nn.Conv2d(4, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer(x) if torch.rand(()) < 0.5 else x.sin()
        return x[x > 0] if self.indexed else x


@pytest.mark.slow
@pytest.mark.parametrize("indexed", [False, True])
def test_layers_that_are_left_out_by_chance_count(indexed):
    model, x = Skipping(indexed), torch.randn(4, 4, 32, 32, requires_grad=True)
    found, real = set(), []
    for seed in (1, 2, 3, 4):
        torch.manual_seed(seed)
        foreseen = ucudnn.foresee(model, x)
        found.add(foreseen.peak_bytes - sum(dict(foreseen.held).values()))
        torch.manual_seed(seed)
        real.append(real_bytes(model, x))
    (peak,) = found
    assert min(real) < 0.5 * max(real)
    assert peak == near(max(real))


def state_of(model: nn.Module, x: Tensor) -> list[Any]:
    tensors = [*model.state_dict().values(), x, *(one.grad for one in model.parameters()), x.grad]
    copies = [one if one is None else one.clone() for one in tensors]
    return [*copies, torch.get_rng_state(), random.getstate()]


def is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("name", ["2-D, batch norm", "dropout", "checkpoints", "reads a number"])
def test_nothing_of_the_callers_changes(name):
    make, shape = NETWORKS[name]
    model, x = make(), torch.randn(shape, requires_grad=True)
    model(x).sum().backward()
    before, gradients = state_of(model, x), [one.grad for one in model.parameters()]
    random.random()
    before[-1] = random.getstate()
    foreseer(model, x).step(StepDivision((Segment("", 2),)))
    ucudnn.foresee(model, x)
    assert all(map(is_same, before, state_of(model, x)))
    assert all(a is b.grad for a, b in zip(gradients, model.parameters(), strict=True))
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    # Its next step is as if nothing had been foreseen.
    twin = copy.deepcopy(model)
    for one in (model, twin):
        torch.manual_seed(1)
        one.zero_grad()
        one(x).square().sum().backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_an_operator_without_memory_for_its_operands_is_measured_in_parts(monkeypatch):
    # As many samples as channels: weights are not cut.
    model = Autocast(nn.Sequential(conv(8, 16), nn.GroupNorm(2, 16), nn.SiLU(), conv(16, 8)))
    x, run = torch.randn(16, 8, 24, 24), OperatorTable._run
    whole = foreseer(model, x).step().own_bytes
    sizes = []

    def scarce(self, operator, args, *rest):
        tensors = [one for one in torch.utils._pytree.tree_leaves(args) if isinstance(one, Tensor)]
        sizes.append(max(one.nbytes for one in tensors))
        if sizes[-1] > x.nbytes // 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        return run(self, operator, args, *rest)

    monkeypatch.setattr("ucudnn.benchmark.operators._known", {})
    monkeypatch.setattr(OperatorTable, "_run", scarce)
    found = foreseer(model, x).step()
    assert max(sizes) > x.nbytes // 2
    assert found.own_bytes == pytest.approx(whole, rel=0.01)
    assert found.own_bytes == pytest.approx(real_bytes(model, x), rel=0.01)
    assert not found.notes


@pytest.mark.process
def test_operators_are_timed_with_new_pages_for_large_results(python):
    """As in a step that needs all that other steps have freed."""
    is_kept, *timed = python("-c", AFTER_A_STEP).stdout.split()
    assert is_kept == "True"
    assert len(timed) >= 2
    assert set(timed) == {"False"}


@pytest.mark.process
def test_an_operator_may_have_what_steps_have_freed_where_there_is_no_more(python):
    assert python("-c", WITHOUT_OTHER_MEMORY).stdout == "\n"


def test_a_lack_of_memory_is_told_from_other_errors():
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("a shape is wrong"))


calls: list[tuple[float, float]] = []


@torch.library.custom_op("ucudnn_tests::picky", mutates_args=())
def picky(x: Tensor, least: float, most: float) -> Tensor:
    """Refuses some of the values that an operator is measured with."""
    if bool((x < least).any()) or bool((x > most).any()):
        raise ValueError("a value is refused")
    calls.append((x.min().item(), x.max().item()))
    if len(calls) == 1:
        time.sleep(0.5)
    return x.clone()


@picky.register_fake
def _(x: Tensor, least: float, most: float) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture
def no_operators(monkeypatch):
    """No operator has been measured yet in this process."""
    monkeypatch.setattr("ucudnn.benchmark.operators._known", {})


class Picky(nn.Module):
    def __init__(self, least: float = -inf, most: float = inf) -> None:
        super().__init__()
        self.bounds = least, most

    def forward(self, x: Tensor) -> Tensor:
        return picky(x.detach().sigmoid(), *self.bounds) + x


@pytest.mark.usefixtures("no_operators")
def test_an_operator_that_cannot_be_measured_is_noted():
    model, x = nn.Sequential(conv(3, 8), Picky(0.0, 0.99)), torch.randn(IMAGES)
    found = foreseer(model, x).step()
    (note,) = found.notes
    assert "picky" in note
    assert "a value is refused" in note
    assert found.own_bytes == near(real_bytes(model, x))


@pytest.mark.usefixtures("no_operators")
def test_an_operator_that_refuses_negative_values_is_measured():
    model, x = nn.Sequential(conv(3, 8), Picky(0.0)), torch.randn(IMAGES)
    assert not foreseer(model, x).step().notes


@pytest.mark.usefixtures("no_operators")
def test_operators_are_measured_with_values_of_both_signs_after_a_first_call():
    # A branch on a sign takes longer if it is not always the same.
    model, x = nn.Sequential(conv(3, 8), Picky()), torch.randn(IMAGES)
    calls.clear()
    found = foreseer(model, x).step()
    assert len(calls) > 1
    assert all(least < -1 and most > 1 for least, most in calls)
    # The first call, which has slept, is not what the operator takes.
    assert found.time_ns < 500_000_000


def test_what_fills_the_peak_is_named_by_module():
    # Of 8 channels, oneDNN makes copies in its own order on any processor.
    model, x = nn.Sequential(conv(8, 8), *(nn.Tanh() for _ in range(3))), torch.randn(4, 8, 32, 32)
    fills = dict(ucudnn.foresee(model, x, operators="none").fills)
    unit = 8 * 4 * 32 * 32 * 4
    assert {name: fills[name] for name in "123"} == dict.fromkeys("123", unit)
    # At the backward of the last layer, two gradients, and scalars of the loss.
    assert fills["backward"] == pytest.approx(2 * unit, abs=4096)
    found = ucudnn.foresee(model[:3], x)
    fills = dict(found.fills)
    assert fills["inside an operator"] > 0
    assert sum(fills.values()) + sum(size for _, size in found.held) == found.peak_bytes
    assert dict(found.held)["parameters"] == bytes_of([*model.parameters()])
    assert [size for _, size in found.fills] == sorted(fills.values(), reverse=True)
    assert (found.batch, found.is_training, found.notes) == (4, True, ())
    assert found.time_ns > 0
    assert "a training step of 4 samples has at most" in str(found)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_state_of_an_optimiser_is_that_of_torchs(optimizer):
    kinds = {
        "sgd": torch.optim.SGD,
        "momentum": partial(torch.optim.SGD, momentum=0.9),
        "rmsprop": torch.optim.RMSprop,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    model, x = NETWORKS["group norm"][0](), torch.randn(IMAGES)
    model[0].bias.requires_grad_(False)
    without = ucudnn.foresee(model, x, optimizer="sgd").peak_bytes
    found = ucudnn.foresee(model, x, optimizer=optimizer)
    state = dict(found.held).get("optimiser state", 0)
    assert found.peak_bytes == without + state
    if optimizer not in kinds:  # torch has none
        return
    used = kinds[optimizer](model.parameters(), lr=1e-3)
    model(x).sum().backward()
    used.step()
    used.zero_grad()
    trained = [used.state[one] for one in model.parameters() if one.requires_grad]
    states = [leaf for one in trained for leaf in one.values() if torch.is_tensor(leaf)]
    # Counts of steps are single numbers.
    assert state == sum(one.nbytes for one in states if one.dim())
    # What a model's optimiser has counts without being named, and of all parameters.
    assert dict(ucudnn.foresee(model, x).held).get("optimiser state", 0) >= bytes_of(states)


def test_an_unknown_optimiser_is_refused():
    with pytest.raises(ConfigError, match="optimizer must be one of sgd, .*adamw, got 'sofia'"):
        ucudnn.foresee(conv(3, 8), torch.randn(IMAGES), optimizer="sofia")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2-D, batch norm", "residual", "attention", "checkpoints"])
@pytest.mark.parametrize("batch", [1, 9])
def test_another_batch_is_foreseen_from_the_same_example(name, batch):
    make, shape = NETWORKS[name]
    model, x = make(), torch.randn(shape)
    found = ucudnn.foresee(model, x, batch=batch)
    real = torch.randn(batch, *shape[1:])
    held = bytes_of([*model.parameters(), *model.buffers(), real])
    assert found.batch == batch
    assert found.peak_bytes == near(held + real_bytes(model, real))


@pytest.mark.slow
def test_operators_in_part_or_none_are_near_or_below():
    model = nn.Sequential(conv(8, 32), nn.GroupNorm(2, 32), nn.SiLU(), conv(32, 8))
    x = torch.empty(48, 8, 112, 112)
    whole, parts, none = (
        ucudnn.foresee(model, x, operators=one) for one in ("whole", "in part", "none")
    )
    assert 64 * MIB < 48 * 32 * 112 * 112 * 4  # the operands of which only parts are measured
    assert parts.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)
    assert parts.time_ns > 0
    assert none.time_ns == 0
    # Without what operators need inside: here a kernel's workspace, or what is copied for it.
    assert 0.5 * whole.peak_bytes < none.peak_bytes <= whole.peak_bytes


@pytest.mark.parametrize("seed", range(8))
def test_the_largest_batch_is_that_of_brute_force(seed):
    chance = random.Random(seed)
    steps = [chance.choice([0, 1, 7, 1000]) for _ in range(300)]
    peaks = [chance.randrange(50)]
    for one in steps:
        peaks.append(peaks[-1] + one)
    calls = []

    def peak_at(batch):
        calls.append(batch)
        return peaks[batch] if batch < len(peaks) else peaks[-1] + 1000 * (batch - len(peaks) + 1)

    for budget in (peaks[1] - 1, peaks[1], chance.choice(peaks), peaks[-1], peaks[-1] + 5500):
        calls.clear()
        largest = max((n for n in range(1, 400) if peak_at(n) <= budget), default=0)
        calls.clear()
        expected = (largest, peak_at(largest)) if largest else (0, 0)
        assert largest_batch(peak_at, chance.randint(1, 64), budget) == expected


@pytest.mark.slow
def test_the_largest_batch_of_a_model_is_that_of_brute_force():
    model, x = (
        nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 4)),
        torch.randn(4, 3, 24, 24),
    )
    peaks = {
        n: ucudnn.foresee(model, x, batch=n, optimizer="adam").peak_bytes for n in range(1, 25)
    }
    plan = lean(model, torch.randn(24, 3, 24, 24))
    by_plan = {n: ucudnn.foresee(model, x, plan, batch=n).peak_bytes for n in range(1, 25)}
    for limit in (peaks[1] - 1, peaks[7], peaks[20] - 1):
        found = largest_batches(model, x, None, Config(), limit, optimizer="adam")
        assert found["undivided"] == max((n for n in peaks if peaks[n] <= limit), default=0)
        assert found["in segments"] >= found["undivided"]
    limit = by_plan[9]
    found = largest_batches(model, x, plan, Config(), limit)
    assert found["by the plan"] == max(n for n in by_plan if by_plan[n] <= limit)


class Refusing(nn.Module):
    def forward(self, _: Tensor) -> Tensor:
        raise ValueError("not these inputs")


def test_a_model_that_refuses_its_inputs_is_an_error():
    with pytest.raises(ConfigError, match="does not accept example inputs .*not these inputs"):
        ucudnn.foresee(Refusing(), torch.randn(IMAGES))


def test_with_convolutions_in_chunks_a_step_needs_what_a_plan_of_chunks_needs():
    """A plan of chunks of one sample runs for real; columns are the workspace of each sample."""
    model = nn.Sequential(nn.Conv2d(4, 4, 5, padding=2), nn.ReLU(), nn.Conv2d(4, 2, 5, padding=2))
    model, x = model.double(), torch.randn(8, 4, 48, 48, dtype=torch.float64)
    backend = open_backend("torch_cpu")
    found = foreseer(model, x).step()
    plan = in_chunks(backend, trace_layers(model, x).layers, 1)
    real = found.held.total + real_bytes(model, x, plan=plan)
    assert real < 0.8 * found.peak_bytes
    assert found.split.peak_bytes == pytest.approx(real, rel=0.02)
    assert found.own_peak_bytes <= found.split.peak_bytes
