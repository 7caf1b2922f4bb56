"""Plans that act without a layer being touched: `installed` stands in for torch's operators."""

from __future__ import annotations

import copy
import threading
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import ucudnn
from ucudnn.backends.torch_cpu.backend import TorchCpuBackend
from ucudnn.errors import UnplannedWarning
from ucudnn.execution import override as dispatch
from ucudnn.outcomes import Origin


@pytest.fixture(autouse=True)
def _nothing_stays_installed():
    yield
    assert not any(override._open or override._runner for override in dispatch._overrides.values())


class Functional(nn.Module):
    """A convolution that no module shows, a transposed one and one of a subclass."""

    class Mine(nn.Conv2d):
        pass

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 3, 3))
        self.up = nn.ConvTranspose2d(6, 5, 3, stride=2, output_padding=1)
        self.mine = self.Mine(5, 3, 3, groups=1, bias=False)

    def forward(self, x):
        return self.mine(self.up(torch.relu(functional.conv2d(x, self.weight))))


SHAPE = (5, 4, 9, 8)


def step(model, x):
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def assert_close(ours, theirs):
    for mine, torchs in zip(ours, theirs, strict=True):
        error = (mine - torchs).norm() / torchs.norm()
        assert error < 1e-5


def test_untouched_models_follow_the_plan_inside_with_alone(plan_by_hand, computed):
    model, x = Functional(), torch.randn(SHAPE)
    context = ucudnn.installed(plan_by_hand(model, x.clone().requires_grad_()))
    before = step(model, x)
    for _ in range(2):
        assert not computed
        with context:
            assert_close(step(model, x), before)
        # the passes of a transposed convolution are those of the convolution it is the gradient of
        assert computed[:7] == ["fprop", "dgrad", "fprop", "dgrad", "wgrad", "fprop", "wgrad"]
        assert sorted(computed[7:]) == ["dgrad", "wgrad"]
        computed.clear()
        assert all(map(torch.equal, step(model, x), before))
    assert not computed


def test_smaller_batches_and_inference_follow_it_too(plan_by_hand, computed):
    model, x = nn.Conv2d(4, 6, 3), torch.randn(SHAPE)
    y = model(x)
    with ucudnn.installed(plan_by_hand(model, x)):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                for batch in range(1, 6):
                    assert_close([model(x[:batch])], [y[:batch]])
        assert_close([model(x[0])], [y[0]])
    assert computed == ["fprop"] * 11


def test_convolutions_of_other_layers_are_torchs_without_a_word(plan_by_hand, computed):
    model, x = nn.Conv2d(4, 6, 3), torch.randn(SHAPE)
    others = [nn.Conv2d(4, 7, 3), nn.Conv2d(4, 6, 3, stride=2)]
    with ucudnn.installed(plan_by_hand(model, x)), warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [step(other, x) for other in others]
        assert others[0](x[:0]).shape == (0, 7, 7, 6)
    assert not computed
    for other, result in zip(others, results, strict=True):
        assert all(map(torch.equal, step(other, x), result))


def test_the_last_installed_acts_alone_and_any_may_close_first(plan_by_hand, computed):
    first, second = nn.Conv2d(4, 6, 3), nn.Conv2d(4, 3, 3)
    x = torch.randn(SHAPE)
    plans = [plan_by_hand(model, x) for model in (first, second)]

    def used():
        computed.clear()
        with torch.no_grad():
            return [
                bool([model(x), computed.copy(), computed.clear()][1]) for model in (first, second)
            ]

    outer, inner = ExitStack(), ExitStack()
    outer.enter_context(ucudnn.installed(plans[0]))
    assert used() == [True, False]
    inner.enter_context(ucudnn.installed(plans[1]))
    assert used() == [False, True]
    outer.close()
    assert used() == [False, True]
    with ucudnn.installed(plans[0]):
        assert used() == [True, False]
    assert used() == [False, True]
    inner.close()
    assert used() == [False, False]


def test_an_exception_restores_torchs_operators(plan_by_hand):
    model, x = nn.Conv2d(4, 6, 3), torch.randn(SHAPE)
    with pytest.raises(KeyError), ucudnn.installed(plan_by_hand(model, x)):
        raise KeyError
    plan = plan_by_hand(model, x)
    with pytest.raises(RuntimeError, match="to have 4 channels"), ucudnn.installed(plan):
        model(torch.randn(5, 3, 9, 8))


@pytest.mark.slow
def test_threads_while_plans_come_and_go(plan_by_hand):
    model, x = nn.Conv2d(4, 6, 3), torch.randn(SHAPE)
    truth = step(copy.deepcopy(model), x)
    plan = plan_by_hand(model, x.clone().requires_grad_())
    stop, failures = threading.Event(), []

    def train():
        mine = copy.deepcopy(model)
        while not stop.is_set():
            try:
                assert_close(step(mine, x), truth)
            except BaseException as error:
                failures.append(error)
                raise

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        with ucudnn.installed(plan):
            step(model, x)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_tuning_inside_times_torchs_own_convolution(plan_by_hand, monkeypatch):
    """The baseline and the executables of `torch_default` must not run the installed plan."""
    model, x = nn.Conv2d(4, 6, 3), torch.randn(SHAPE, requires_grad=True)
    plan = plan_by_hand(model, x)
    problems = [kernel.problem for kernel in plan.kernels]
    backend = TorchCpuBackend()
    with ucudnn.installed(plan) as installation:
        monkeypatch.setattr(type(installation.runner), "bound", None)  # would be called
        for problem in problems:
            a, b = backend.operands(problem, problem.batch)
            backend.executable(problem, "torch_default").alone(a, b)
        with pytest.raises(TypeError):
            model(x)


def test_a_converted_model_inside_follows_its_own_plan(plan_by_hand, computed):
    model, x = nn.Conv2d(4, 6, 3), torch.randn(SHAPE)
    before = step(model, x)
    plan = plan_by_hand(model, x.clone().requires_grad_(), chunk=1)
    ucudnn.convert_(model, plan)
    with ucudnn.installed(plan_by_hand(nn.Conv2d(4, 6, 3), x.clone().requires_grad_())):
        assert_close(step(model, x), before)
    assert computed == ["fprop", "dgrad", "wgrad"]


@pytest.mark.slow
def test_autocast_and_backward_inside_it(plan_by_hand, computed):
    model, x = nn.Conv2d(4, 6, 3), torch.randn(SHAPE)
    with torch.autocast("cpu", torch.bfloat16):
        plan = plan_by_hand(model, x.clone().requires_grad_())
        before = step(model, x)
        with ucudnn.installed(plan):
            after = step(model, x)
    assert computed
    for ours, theirs in zip(after, before, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() < 2e-2 * theirs.norm()


ANOTHER_LIBRARY = """
import sys, warnings
import torch
import ucudnn

warnings.filterwarnings("ignore", message="(?s).*previously registered kernel")
calls = []
kernel = torch.library.get_kernel("aten::convolution", "CPU")
keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

def theirs(*arguments):
    calls.append(tuple(arguments[1].shape))
    return kernel.call_boxed(keys, *arguments)

library = torch.library.Library("aten", "IMPL")
library.impl("convolution", theirs, "CPU")
planned, other = torch.nn.Conv2d(4, 6, 3), torch.nn.Conv2d(4, 2, 1)
x = torch.ones(5, 4, 9, 8)
with ucudnn.installed(ucudnn.Plan.load(sys.argv[1])):
    modules = set(sys.modules)
    planned(x)
    modules = set(sys.modules) - modules
    other(x)
planned(x)
print(calls, modules, "torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_another_librarys_kernel_is_kept(plan_by_hand, python, tmp_path):
    """What stood in before us computes what is not planned, and everything afterwards.

    Computing imports nothing: a child forked in the middle of an import would wait for its end.
    """
    model, x = nn.Conv2d(4, 6, 3), torch.randn(SHAPE)
    plan_by_hand(model, x).save(tmp_path / "plan.json")
    done = python("-c", ANOTHER_LIBRARY, tmp_path / "plan.json")
    assert done.stdout == "[(2, 4, 1, 1), (6, 4, 3, 3)] set() False\n"


@contextmanager
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("convert", [False, True])
def test_compiled_graphs_follow_the_plan_only_while_it_is_installed(
    plan_by_hand, computed, convert
):
    model, x = Functional(), torch.randn(SHAPE)
    before = step(model, x)
    plan = plan_by_hand(model, x.clone().requires_grad_())
    if convert:
        ucudnn.convert_(model, plan, lambda _, name: name == "up")
    with fresh_compiler():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_close(step(compiled, x), before)
        assert not computed
        with ucudnn.installed(plan):
            assert_close(step(compiled, x), before)
        assert len(computed) == 9
        computed.clear()
        step(compiled, x)
        assert not computed


@pytest.mark.slow
def test_inductor_lays_out_a_converted_model_as_it_does_torchs(plan_by_hand):
    """A custom operator in the graph would turn the layout optimisation off (torch 2.13)."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.graph import GraphLowering

    decided = []

    def compiler(graph, inputs):
        decided.append(GraphLowering.decide_layout_opt(graph, is_inference=False))
        return make_boxed_func(graph.forward)

    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    x = torch.randn(4, 8, 9, 9)
    ucudnn.convert_(model, plan_by_hand(model, x))
    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=lambda graph, _: make_boxed_func(graph)
    )
    with fresh_compiler():
        torch.compile(model, fullgraph=True, backend=backend)(x).sum().backward()
    assert decided == [True]


@pytest.mark.parametrize("algorithm", ["onednn_nhwc", "slow_conv2d", "im2col_gemm"])
@pytest.mark.parametrize("chunk", [2, 4])
@pytest.mark.parametrize(
    "bias_of",
    [
        lambda memory: memory[:, 2],
        lambda memory: memory[1, ::2][:8],
        lambda memory: memory[0, :1].expand(8),
    ],
    ids=["column", "every second", "expanded"],
)
def test_a_bias_that_is_not_contiguous(plan_by_hand, algorithm, chunk, bias_of):
    x, w, bias = torch.randn(4, 8, 9, 9), torch.randn(8, 8, 3, 3), bias_of(torch.randn(8, 16))
    layer = nn.Conv2d(8, 8, 3)
    plan = plan_by_hand(layer, x, chunk, algorithm)
    with ucudnn.installed(plan):
        found = functional.conv2d(x, w, bias)
    expected = functional.conv2d(x.double(), w.double(), bias.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_kernel_that_was_left_out_is_not_said_to_be_unknown(plan_by_hand, batch):
    """Tuning with this shape is what the user did; there was no time for it."""
    layer, x = torch.nn.Conv1d(3, 4, 3), torch.ones(2, 3, 9)
    plan = plan_by_hand(layer, x)
    fprop = next(kernel for kernel in plan.kernels if kernel.problem.op == "fprop")
    rest = tuple(kernel for kernel in plan.kernels if kernel is not fprop)
    partial = replace(plan, kernels=rest, origin=Origin(left_out=(str(fprop.problem),)))
    with (
        ucudnn.installed(partial),
        pytest.warns(UnplannedWarning, match="was left out of the plan, because the time was over"),
    ):
        layer(x[:batch])
