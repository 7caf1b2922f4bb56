"""A plan that compiles: its share of the activations holds, and its results are torch's."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.config import Config
from ucudnn.errors import PlanError, TuningInterruptedError
from ucudnn.execution.compiling import is_compiled
from ucudnn.execution.micro_batching import segment_
from ucudnn.outcomes import Way
from ucudnn.plan import Plan
from ucudnn.reports.text import plan_title, plan_verdict
from ucudnn.segment import UNCOMPILED, Segment, StepDivision
from ucudnn.steps.comparing import CompiledComparer
from ucudnn.steps.compiled import CompiledWays
from ucudnn.steps.fit import _Fitting
from ucudnn.steps.race import StepTimes
from ucudnn.steps.run import Steps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ucudnn.errors.UntunedWarning"),
    pytest.mark.filterwarnings("ignore::ucudnn.errors.NoiseWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # Inductor uses what torch itself calls deprecated.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]
SHAPE = (8, 3, 24, 24)
QUICK = {"effort": "quick", "time_budget_s": 10.0}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def block(width: int = 16, kind: type[nn.Module] = nn.BatchNorm2d) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), kind(width), nn.ReLU())


def network(blocks: int = 5) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *(block() for _ in range(blocks)), nn.Conv2d(16, 4, 1)
    )


class Noting:
    """A backend that notes the share of activations at each compilation, and runs graphs as is."""

    def __init__(self):
        self.shares, self.runs = [], []

    def __call__(self, graph, inputs):
        del inputs
        number = len(self.shares)
        self.shares.append(functorch.activation_memory_budget)

        def run(*tensors):
            self.runs.append(number)
            return graph.forward(*tensors)

        return run


def planned(compiled, *segments, **settings):
    """A plan that only divides and compiles."""
    from ucudnn.kernels.tune import plan_without_kernels

    backend = open_backend("torch_cpu")
    plan = plan_without_kernels(backend, Config(**settings))
    return Plan(
        (),
        plan.device,
        plan.software,
        plan.conditions,
        plan.config,
        segments=segments,
        compiled=compiled,
    )


def gradients(model, x, seed=0):
    model.zero_grad()
    torch.manual_seed(seed)
    model(x).square().mean().backward()
    return [one.grad.clone() for one in model.parameters()]


def wrapped(model, backend):
    return torch.compile(model, backend=backend)


def in_place(model, backend):
    model.compile(backend=backend)
    return model


@pytest.mark.parametrize("compiled_by", [wrapped, in_place])
def test_a_share_holds_for_whatever_is_compiled_later(compiled_by):
    backend, x = Noting(), torch.randn(SHAPE)
    model = compiled_by(network(), backend)
    ucudnn.convert_(model, planned(0.5))
    for samples in (8, 8, 3, 8, 3):  # with the uneven last batch of each epoch
        model(x[:samples]).mean().backward()
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    model(x)
    assert backend.shares == [0.5] * 3
    # Each size has code of its own, to which it comes back.
    assert backend.runs == [0, 0, 1, 0, 1, 2, 0]
    # Further sizes get code for any size.
    for samples in (4, 5, 6, 7):
        model(x[:samples])
    assert len(backend.shares) <= 5
    assert set(backend.shares) == {0.5}
    assert functorch.activation_memory_budget == 1.0


def test_evaluations_before_training_leave_the_batch_its_code():
    backend, x = Noting(), torch.randn(SHAPE)
    model = torch.compile(network(), backend=backend)
    ucudnn.convert_(model, planned(0.5))
    model.eval()
    with torch.no_grad():
        model(x[:5]), model(x[:2])
    model.train()
    for samples in (8, 3, 8, 3, 8):
        model(x[:samples])
    assert backend.runs == [0, 1, 2, 3, 2, 3, 2]


class Scaled(nn.Module):
    """A network whose result is multiplied by an argument."""

    def __init__(self):
        super().__init__()
        self.inner = network(2)

    def forward(self, x, factor):
        return self.inner(x) * factor


def test_a_number_that_changes_leaves_the_batch_its_code():
    backend, x = Noting(), torch.randn(SHAPE)
    model = torch.compile(Scaled(), backend=backend)
    ucudnn.convert_(model, planned(0.5))
    for factor in range(2, 9):
        for samples in (8, 3):
            expected = factor * model._orig_mod.inner(x[:samples])
            torch.testing.assert_close(model(x[:samples], factor), expected)
    first, second = backend.runs[-2:]
    assert first != second
    assert set(backend.runs[-6:]) == {first, second}
    assert set(backend.shares) == {0.5}


class Unsettled(nn.Module):
    """A block that Dynamo cannot trace as one graph, and that counts its calls."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = block(), 0

    def forward(self, x):
        torch._dynamo.graph_break()
        self.calls += 1
        return (self.inner(x) * self.calls).square()


def test_a_recomputed_module_that_is_no_part_of_a_graph_is_recomputed_as_uncompiled():
    x = torch.randn(SHAPE)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), Unsettled(), nn.Conv2d(16, 4, 1))
    twin = copy.deepcopy(model)
    truth = gradients(twin, x)
    ucudnn.convert_(model, planned(None, Segment("1", None)))
    found = gradients(torch.compile(model, backend="aot_eager"), x)
    torch.testing.assert_close(found, truth)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    assert model[1].calls == 1


class Naming(nn.Module):
    """A network that calls its block with arguments named as those of torch's checkpoint."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3), Debugged()

    def forward(self, x):
        return self.last(self.first(x), debug=True, shift=x[:1, :1, 1:-1, 1:-1])


class Debugged(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = block()

    def forward(self, x, debug, shift):
        return self.inner(x) + shift if debug else x


def test_arguments_of_a_recomputed_module_may_have_any_name():
    x, model = torch.randn(SHAPE), Naming()
    truth = gradients(copy.deepcopy(model), x)
    ucudnn.convert_(model, planned(None, Segment("last", None)))
    compiled = torch.compile(model, backend=aot_eager_decomp_partition, fullgraph=True)
    torch.testing.assert_close(gradients(compiled, x), truth)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_a_model_that_is_traced_or_exported_runs_uncompiled():
    model, x = network(2).eval(), torch.randn(SHAPE)
    truth = model(x)
    ucudnn.convert_(model, planned(0.5))
    torch.testing.assert_close(torch.jit.trace(model, x)(x), truth)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.testing.assert_close(exported.module()(x[:3]), truth[:3])


def test_hooks_of_the_wrapper_are_not_left_out():
    model, seen = torch.compile(network(2), backend=Noting()), []
    model.register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(PlanError, match="register them on the module inside"):
        ucudnn.convert_(model, planned(0.5, Segment("[1:2]", None)))
    assert "forward" not in vars(model._orig_mod)
    model(torch.randn(SHAPE))
    assert seen


def test_where_compiling_is_disabled_a_plan_that_compiles_computes_the_same():
    model, x = network(2), torch.randn(SHAPE)
    truth = gradients(copy.deepcopy(model), x)
    model.compile(disable=True)
    assert not is_compiled(model)
    ucudnn.convert_(model, planned(0.5))
    torch.testing.assert_close(gradients(model, x), truth)
    ucudnn.revert_(model)
    torch.testing.assert_close(gradients(model, x), truth)


def test_models_of_one_class_have_a_share_each():
    backend, x = Noting(), torch.randn(SHAPE)
    for share in (1.0, 0.5, 0.0):
        model = torch.compile(network(), backend=backend)
        ucudnn.convert_(model, planned(share))
        model(x)
    assert backend.shares == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("compiled_by", [wrapped, in_place, lambda model, _: model])
def test_a_conversion_is_undone(compiled_by):
    backend, x = Noting(), torch.randn(SHAPE)
    own = network()
    model, keys = compiled_by(own, backend), list(own.state_dict())
    was_compiled, truth = is_compiled(model), gradients(copy.deepcopy(own), x)
    ucudnn.convert_(model, planned(UNCOMPILED))
    assert not is_compiled(model)
    torch.testing.assert_close(gradients(model, x), truth)
    assert not backend.shares
    conversion = ucudnn.convert_(model, planned(0.5))
    assert is_compiled(model)
    assert "the model is compiled, keeping 50 % of the activations" in str(conversion)
    assert list(own.state_dict()) == keys
    assert not is_compiled(copy.deepcopy(own))  # as torch's own compiled call
    ucudnn.revert_(model)
    assert is_compiled(model) == was_compiled
    torch.testing.assert_close(gradients(model, x), truth)
    assert set(backend.shares) <= {1.0}


def test_a_model_that_a_plan_compiles_can_be_tuned_traced_and_foreseen():
    model, x = network(2), torch.randn(SHAPE)
    expected = ucudnn.trace(model, x), ucudnn.foresee(model, x).peak_bytes
    ucudnn.convert_(model, planned(UNCOMPILED))
    assert ucudnn.tune(model, x, Config(policy="undivided", **QUICK)).kernels
    model.compile(backend=aot_eager_decomp_partition)
    ucudnn.convert_(model, planned(0.5))
    assert (ucudnn.trace(model, x), ucudnn.foresee(model, x).peak_bytes) == expected
    plan = ucudnn.tune(model, x, Config(policy="undivided", **QUICK))
    assert plan.compilation.is_compiled or not plan.compilation.ways
    with pytest.raises(PlanError, match=r"was converted; call ucudnn.revert_"):
        ucudnn.tune(model, x, Config(memory_budget="50%", **QUICK))


@pytest.mark.parametrize(
    "segments",
    [
        [Segment("1", None), Segment("2", None)],
        [Segment("[1:6]", None)],
        [Segment("[1:6]", None), Segment("[2:4]", None), Segment("3.0", None)],
        [Segment("1", None, recompute=False, selective=True)],
    ],
)
def test_modules_that_are_recomputed_belong_to_the_graph(segments):
    graphs, x = [], torch.randn(SHAPE)
    model = network()
    twin = copy.deepcopy(model)
    model[3].add_module("drop", nn.Dropout(0.5))
    twin[3].add_module("drop", nn.Dropout(0.5))

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager_decomp_partition(graph, inputs)

    truth = gradients(torch.compile(twin, backend=backend), x)
    segment_(model, segments)
    torch.testing.assert_close(gradients(torch.compile(model, backend=backend), x), truth)
    assert len(graphs) == 2
    assert model[1][1].num_batches_tracked == 1
    torch.testing.assert_close(model[1][1].running_var, twin[1][1].running_var)
    tags = [m for m in graphs[1].modules() if isinstance(m, torch.fx.GraphModule)]
    recomputed = sum(one.recompute for one in segments)
    assert len(tags) == 1 + recomputed


def saved_bytes(model, x):
    """What a forward keeps for backward."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        model(x)
    return sum(sizes.values())


def test_recomputed_modules_keep_less_for_backward():
    model, x = network(), torch.randn(SHAPE)
    partition = partial(torch.compile, backend=aot_eager_decomp_partition)
    whole = saved_bytes(partition(copy.deepcopy(model)), x)
    segment_(model, [Segment("[1:6]", None)])
    assert saved_bytes(partition(model), x) < 0.5 * whole


def wrong(graph, inputs):
    """A backend whose code has no gradients for the first parameters, as a bug of a compiler."""
    del inputs

    def run(*tensors):
        cut = [
            one.detach() if n < 2 and isinstance(one, nn.Parameter) else one
            for n, one in enumerate(tensors)
        ]
        return graph.forward(*cut)

    return run


def test_a_way_with_other_gradients_is_left_out(monkeypatch):
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", wrong)
    plan = ucudnn.tune(network(), torch.randn(SHAPE), Config(compile="auto", **QUICK))
    assert plan.compiled is None
    [(name, reason), *_] = plan.compilation.left_out
    assert name == "compiled"
    assert reason == "the gradient of '0.weight' differs from torch's by 1e+02 %"


def refuse(graph, inputs):
    raise RuntimeError("no C++ compiler\nat length")


@pytest.mark.parametrize("budget", [None, "80%"])
def test_without_a_compiler_the_plan_is_uncompiled_and_says_why(monkeypatch, budget, tmp_path):
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refuse)
    config = Config(compile="auto", memory_budget=budget, **QUICK)
    plan = ucudnn.tune(network(), torch.randn(SHAPE), config)
    assert plan.compiled is None
    assert "torch.compile failed (RuntimeError: no C++ compiler)" in " ".join(plan_verdict(plan))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").compilation == plan.compilation


class Branching(nn.Module):
    """A network whose graph breaks before its convolutions."""

    def __init__(self):
        super().__init__()
        self.inner = network(2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        torch._dynamo.graph_break()
        return self.inner(x) * (1 + 1e-9 * self.calls)


def test_graphs_and_breaks_are_counted():
    backend, x = Noting(), torch.randn(SHAPE)
    model = torch.compile(Branching(), backend=backend)
    plan = ucudnn.tune(model, x, Config(memory_budget="150%", **QUICK))
    found = plan.compilation
    assert found.graphs >= 1
    assert found.breaks >= 1


class Untraceable(nn.Module):
    """A network of which Dynamo compiles nothing."""

    def __init__(self):
        super().__init__()
        self.inner = network(2)

    @torch.compiler.disable
    def forward(self, x):
        return self.inner(x)


class Recompiled(nn.Module):
    """A network of which each call needs other code."""

    def __init__(self):
        super().__init__()
        self.inner = network(2)
        self.scales = iter([float(n) for n in range(1, 99)])

    def forward(self, x):
        return self.inner(x) * next(self.scales)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Untraceable, "torch.compile found no graph in it"),
        (Recompiled, r"torch.compile failed \(.*recompile"),
    ],
)
def test_what_runs_uncompiled_is_not_called_compiled(kind, reason, monkeypatch):
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, _: graph.forward)
    with torch._dynamo.config.patch(recompile_limit=1):
        plan = ucudnn.tune(kind(), torch.randn(SHAPE), Config(compile="auto", **QUICK))
    assert plan.compiled is None
    assert re.match(reason, dict(plan.compilation.left_out)["compiled"])


@pytest.mark.parametrize("compiled_by", [wrapped, in_place])
def test_a_compiled_model_is_planned_within_a_budget(compiled_by, tmp_path):
    model, x = network(), torch.randn(SHAPE)
    truth = gradients(copy.deepcopy(model), x)
    compiled = compiled_by(model, aot_eager_decomp_partition)
    config = Config(memory_budget="85%", compile_budget_s=60, **QUICK)
    plan = ucudnn.tune(compiled, x, config)
    assert plan.compiles, plan.compilation
    assert plan.memory.plan_peak_bytes <= plan.memory.budget_bytes
    assert plan_title(plan).startswith("compiled")
    assert plan.compilation.graphs == 1
    ucudnn.convert_(compiled, plan)
    compiled(x)
    backend = open_backend("torch_cpu")
    peak = backend.span(lambda: compiled(x).square().mean().backward()).peak_bytes
    assert plan.memory.held_bytes + peak <= 1.02 * plan.memory.budget_bytes
    copied = copy.deepcopy(model)
    torch.testing.assert_close(gradients(compiled, x), truth, rtol=1e-3, atol=1e-5)
    assert not is_compiled(copied)
    # A smaller budget costs no less time; a larger one follows what is known.
    again = ucudnn.tune(compiled_by(copied, aot_eager_decomp_partition), x, config)
    assert again.memory.plan_peak_bytes <= again.memory.budget_bytes


def wasteful(graph, inputs):
    """A backend whose code needs far more memory than torch."""
    del inputs

    def run(*tensors):
        torch.empty(1 << 26)
        return graph.forward(*tensors)

    return run


def test_below_what_compiled_steps_take_the_plan_is_not_compiled():
    model, x = network(), torch.randn(SHAPE)
    truth = gradients(copy.deepcopy(model), x)
    compiled = torch.compile(model, backend=wasteful)
    with pytest.raises(PlanError, match="is too small") as caught:
        ucudnn.tune(compiled, x, Config(memory_budget="20%", compile_budget_s=30, **QUICK))
    budget = caught.value.smallest_bytes
    plan = ucudnn.tune(compiled, x, Config(memory_budget=budget, compile_budget_s=30, **QUICK))
    assert plan.compiled == UNCOMPILED
    assert plan.memory.plan_peak_bytes <= budget
    assert "not compiled" in plan_title(plan)
    ucudnn.convert_(compiled, plan)
    torch.testing.assert_close(gradients(compiled, x), truth)
    backend = open_backend("torch_cpu")
    peak = backend.span(lambda: compiled(x).square().mean().backward()).peak_bytes
    assert plan.memory.held_bytes + peak <= 1.1 * budget


def test_what_is_known_holds_for_one_compiler():
    model, x = network(), torch.randn(SHAPE)
    model.compile(backend=aot_eager_decomp_partition)
    plan = ucudnn.tune(model, x, Config(memory_budget="95%", compile_budget_s=60, **QUICK))
    assert plan.compiles
    model.compile(backend=wasteful)
    plan = ucudnn.tune(model, x, Config(memory_budget="94%", compile_budget_s=60, **QUICK))
    assert plan.compiled == UNCOMPILED


AUTO = Config(memory_budget="85%", compile="auto", compile_budget_s=60, **QUICK)


@pytest.fixture
def _fast_compiler(monkeypatch):
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", aot_eager_decomp_partition)


@pytest.mark.usefixtures("_fast_compiler")
@pytest.mark.parametrize("compiled_by", [lambda model, _: model, wrapped])
def test_a_refusal_names_the_smallest_peak_of_compiled_steps(compiled_by):
    x = torch.randn(SHAPE)
    model = compiled_by(network(), aot_eager_decomp_partition)
    with pytest.raises(PlanError, match=r"\(compiled, .*\); raise the budget") as caught:
        ucudnn.tune(model, x, replace(AUTO, memory_budget="40%"))
    budget = caught.value.smallest_bytes
    plan = ucudnn.tune(model, x, replace(AUTO, memory_budget=budget))
    assert plan.compiles
    ucudnn.convert_(model, plan)
    gradients(model, x)
    model.zero_grad()
    backend = open_backend("torch_cpu")
    span = backend.span(lambda: model(x).square().mean().backward())
    assert plan.memory.held_bytes + span.peak_bytes <= budget


@pytest.mark.usefixtures("_fast_compiler")
def test_kernels_take_none_of_the_time_for_compiling(monkeypatch):
    late = [0.0]
    monkeypatch.setattr("ucudnn.steps.compiled.monotonic", lambda: time.monotonic() + late[0])
    candidate = _Fitting._candidate

    def slow(fitting):
        late[0] += 1000
        return candidate(fitting)

    monkeypatch.setattr(_Fitting, "_candidate", slow)
    plan = ucudnn.tune(network(), torch.randn(SHAPE), AUTO)
    assert not plan.compilation.not_tried


@pytest.mark.usefixtures("_fast_compiler")
def test_what_there_is_no_time_for_is_named_once():
    plan = ucudnn.tune(network(), torch.randn(SHAPE), replace(AUTO, compile_budget_s=1e-3))
    names = plan.compilation.not_tried
    assert names
    assert len(names) == len({*names})


def wrong_at_half(graph, inputs):
    """A compiler that has a bug at one share."""
    is_half = functorch.activation_memory_budget == 0.5
    return (wrong if is_half else aot_eager_decomp_partition)(graph, inputs)


def test_another_share_is_tried_if_one_computes_something_else(monkeypatch):
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", wrong_at_half)
    plan = ucudnn.tune(network(), torch.randn(SHAPE), replace(AUTO, memory_budget="75%"))
    assert "compiled, keeping 50 % of the activations" in dict(plan.compilation.left_out)
    names = [one.name for one in plan.compilation.ways]
    assert "compiled, keeping 75 % of the activations" in names


def ways_of(model, x, known=None, **settings):
    config = Config(compile="auto", layout="auto", **settings)
    return CompiledWays(model, x, config, open_backend("torch_cpu"), 0, [], known)


def half(layout, peak, time):
    division = StepDivision(compiled=0.5)
    way = Way("compiled", "", division=division, memory_format=layout)
    return {(division, layout): replace(way, peak_bytes=peak, time_ns=time)}


@pytest.mark.parametrize(
    ("keep", "last", "limit", "tried"),
    [
        # Without one that keeps the limit, smaller shares in the faster layout; then the other's.
        ((590, 30), (597, 24), 480, ["channels_last"] * 3 + ["keep"] * 3),
        ((590, 24), (580, 30), 480, ["keep"] * 3 + ["channels_last"] * 3),
        # The layout that keeps it, unless the other one is clearly faster.
        ((590, 30), (597, 24), 592, ["channels_last"] * 3),
        ((590, 25), (597, 24), 592, ["keep"] * 3),
    ],
)
def test_smaller_shares_are_tried_in_the_faster_layout(monkeypatch, keep, last, limit, tried):
    known = {**half("keep", *keep), **half("channels_last", *last)}
    ways, found = ways_of(network(), torch.randn(SHAPE), known), []

    def attempt(division, layout):
        key = division, layout
        if key in known:
            if ways.fits(known[key]):
                ways._best = known[key], None, None
            return known[key]
        found.append(layout)
        known[key] = replace(known[StepDivision(compiled=0.5), layout], division=division)
        return known[key]

    monkeypatch.setattr(ways, "attempt", attempt)
    ways.within(limit, 1000)
    assert found == tried


@pytest.mark.usefixtures("_fast_compiler")
@pytest.mark.parametrize("compiled_ns", [(90, 90, 140), (110, 110, 90)])
@pytest.mark.parametrize("segments", [(), (Segment("1", None),)])
def test_in_doubt_torchs_own_step_stays(monkeypatch, compiled_ns, segments):
    ways = ways_of(network(), torch.randn(SHAPE))
    assert ways.attempt(StepDivision(compiled=1.0), "keep") is not None
    samples = [[StepTimes(one, {}) for one in times] for times in ((100, 100, 100), compiled_ns)]
    monkeypatch.setattr("ucudnn.steps.compiled.StepMeter.race", lambda *_: samples)
    is_shorter = bool(segments) and compiled_ns[0] < 100
    assert ways.is_faster(planned(None, *segments)) is is_shorter


@pytest.mark.usefixtures("_fast_compiler")
def test_a_model_without_images_is_compiled_in_one_layout():
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3))
    plan = ucudnn.tune(model, torch.randn(8, 3, 200), replace(AUTO, layout="auto"))
    found = plan.compilation
    names = [one.name for one in found.ways] + [*dict(found.left_out)] + [*found.not_tried]
    assert names
    assert not [one for one in names if "channels_last" in one]


@pytest.mark.usefixtures("_fast_compiler")
def test_without_memory_for_compiling_the_plan_is_uncompiled(monkeypatch):
    def lacking(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("ucudnn.steps.compiled.Steps", lacking)
    plan = ucudnn.tune(network(), torch.randn(SHAPE), AUTO)
    assert plan.compiled is None
    assert "CUDA out of memory" in str(plan.compilation)


@pytest.mark.usefixtures("_fast_compiler")
def test_a_second_try_after_a_failure(monkeypatch):
    model, x = network(), torch.randn(SHAPE)
    with monkeypatch.context() as patch:
        patch.setattr("torch._inductor.compile_fx.compile_fx", refuse)
        assert ucudnn.tune(model, x, AUTO).compilation.left_out
    plan = ucudnn.tune(model, x, AUTO, remeasure=True)
    assert plan.compilation.ways


@pytest.mark.usefixtures("_fast_compiler")
def test_errors_of_dynamo_that_are_suppressed_are_told():
    with torch._dynamo.config.patch(suppress_errors=True):
        plan = ucudnn.tune(network(), torch.randn(SHAPE), AUTO)
    assert plan.compilation.ways


@pytest.mark.usefixtures("_fast_compiler")
def test_an_interruption_keeps_what_was_compiled(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(CompiledWays, "_bisect", interrupted)
    model, x = torch.compile(network(), backend=aot_eager_decomp_partition), torch.randn(SHAPE)
    with pytest.raises(TuningInterruptedError) as caught:
        ucudnn.tune(model, x, Config(memory_budget="95%", compile_budget_s=60, **QUICK))
    assert caught.value.plan.compiles
    monkeypatch.setattr("ucudnn.steps.tune._Tuning._with_kernels", interrupted)
    monkeypatch.setattr(CompiledWays, "is_faster", lambda *_: True)
    config = Config(compile="auto", compile_budget_s=60, **QUICK)
    with pytest.raises(TuningInterruptedError) as caught:
        ucudnn.tune(network(), x, config)
    assert caught.value.plan.compiles


@pytest.mark.usefixtures("_fast_compiler")
def test_a_part_of_the_batch_is_compared_by_torchs_numbers(monkeypatch):
    drawing = []

    def noting(graph, inputs):
        drawing.append((inputs[-1].shape[0], inductor.fallback_random))
        return aot_eager_decomp_partition(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", noting)
    model, x = nn.Sequential(network(2), nn.Dropout(0.3)), torch.randn(SHAPE)
    comparer = CompiledComparer(model, x, is_training=True, problems=(), share=0.5)
    steps = Steps(model, x, True, division=StepDivision(compiled=1.0))
    steps.compile()
    drawing.clear()
    comparer.compare(steps)
    assert len(drawing) == 2
    assert all(is_torchs for _, is_torchs in drawing)


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs a compiler")


def wide():
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), *(block(24) for _ in range(6)), nn.Conv2d(24, 4, 1)
    )


def peak_of(model, x):
    """The most that a step allocates, by torch's profiler."""
    model(x).square().mean().backward()
    model.zero_grad()
    backend = open_backend("torch_cpu")
    return backend.span(lambda: model(x).square().mean().backward()).peak_bytes


@pytest.mark.nightly
@needs_compiler
def test_three_shares_in_one_process_have_three_peaks():
    x, peaks = torch.randn(8, 3, 32, 32), []
    for share, segments in ((1.0, []), (0.5, []), (1.0, [Segment("[1:4]", None)])):
        model = wide()
        ucudnn.convert_(model, planned(share, *segments))
        peaks.append(peak_of(model, x))
    assert len(set(peaks)) == 3
    assert peaks[1] < 0.8 * peaks[0]
    assert peaks[2] < 0.95 * peaks[0]


SECOND_PROCESS = """
import sys, torch, ucudnn
sys.path.insert(0, sys.argv[1])
from test_compiled_ways import peak_of, wide
torch.manual_seed(0)
model = wide()
ucudnn.convert_(model, sys.argv[2])
x = torch.randn(8, 3, 32, 32)
first = peak_of(model, x)
model(x[:3]).square().mean().backward()
model.eval()
with torch.no_grad():
    model(x)
model.train()
print(first, peak_of(model, x), model._compiled_call_impl.backend.nodes)
"""


@pytest.mark.nightly
@needs_compiler
def test_a_budget_holds_in_another_process_and_after_an_uneven_batch(tmp_path):
    model, x = wide(), torch.randn(8, 3, 32, 32)
    plan = ucudnn.tune(
        torch.compile(model), x, Config(memory_budget="70%", compile_budget_s=300, **QUICK)
    )
    assert plan.compiles
    plan.save(tmp_path / "plan.json")
    script = tmp_path / "second.py"
    script.write_text(SECOND_PROCESS)
    arguments = [sys.executable, script, Path(__file__).parent, tmp_path / "plan.json"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, again, *_ = done.stdout.split()
    assert int(first) == int(again)
    held = plan.memory.held_bytes
    assert held + int(first) <= 1.02 * plan.memory.budget_bytes


@pytest.mark.nightly
@needs_compiler
def test_code_that_is_computed_again_drops_the_same():
    x, found = torch.randn(8, 3, 32, 32), []
    for segments in ([], [Segment("[1:4]", None)], [Segment("[1:4]", None), Segment("2", None)]):
        torch.manual_seed(0)
        model = wide()
        for one in model[2:5]:
            one.add_module("drop", nn.Dropout(0.3))
        ucudnn.convert_(model, planned(1.0, *segments))
        found.append(gradients(model, x))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=1e-3, atol=1e-5)


@pytest.mark.nightly
@needs_compiler
def test_a_model_with_dropout_is_compared_by_torchs_numbers():
    model, x = nn.Sequential(wide(), nn.Dropout(0.3)), torch.randn(8, 3, 32, 32)
    plan = ucudnn.tune(model, x, Config(compile="auto", compile_budget_s=200, **QUICK))
    assert not plan.compilation.left_out
    assert "compiled" in [way.name for way in plan.compilation.ways]


IN_RANKS = """
import sys, torch, ucudnn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, sys.argv[1])
from test_compiled_ways import planned, wide
from ucudnn.segment import Segment
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = wide().eval()  # each rank has its own statistics in training
twin = DistributedDataParallel(wide().eval())
twin.module.load_state_dict(model.state_dict())
ucudnn.convert_(model, planned(0.5, Segment("[1:4]", None)))
model = DistributedDataParallel(model)
torch.manual_seed(rank)
x = torch.randn(4, 3, 16, 16)
for one in (model, twin):
    one(x).square().mean().backward()
pairs = zip(model.parameters(), twin.parameters(), strict=True)
largest = max(float((a.grad - b.grad).abs().max()) for a, b in pairs)
open(f"{sys.argv[2]}/{rank}.txt", "w").write(str(largest))
"""


@pytest.mark.nightly
@needs_compiler
def test_in_ranks_gradients_are_those_of_all(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(IN_RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", script]
    done = subprocess.run(
        [*command, Path(__file__).parent, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [float((tmp_path / f"{rank}.txt").read_text()) for rank in range(2)]
    assert max(found) < 1e-5
