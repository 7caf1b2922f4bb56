"""`ucudnn run --memory-budget` and `--plan` with segments: a script that is not changed.

The scripts of `unchanged/` know nothing of ucudnn, and count their memory themselves. They are run
as they are, and twice within a budget.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple

import pytest
import torch
from torch import nn

import ucudnn

pytestmark = pytest.mark.process
Run = Callable[..., CompletedProcess[str]]
SCRIPTS = Path(__file__).parent / "unchanged"
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
WITHIN = ("-m", "ucudnn", "run", "--memory-budget")


class Done(NamedTuple):
    """What a script printed."""

    losses: list[float]
    peak: int
    said: list[str]  # by ucudnn


def read(done: CompletedProcess[str]) -> Done:
    """The losses and the peak that a script printed, and what ucudnn said."""
    assert done.returncode == 0, done.stderr
    printed = [line.split() for line in done.stdout.splitlines()]
    losses = [float(words[1]) for words in printed if words[:1] == ["loss"]]
    peak = next((int(words[1]) for words in printed if words[:1] == ["peak"]), 0)
    said = [line for line in done.stderr.splitlines() if line.startswith("ucudnn: ")]
    return Done(losses, peak, said)


@pytest.mark.parametrize(
    ("name", "launch", "needs"),
    [
        ("plain", (), "torch"),
        pytest.param("guarded", (), "torch", marks=pytest.mark.nightly),
        pytest.param("fsdp2", RANKS, "torch", marks=pytest.mark.nightly),
        pytest.param("ddp", RANKS, "torch", marks=pytest.mark.nightly),
        pytest.param("transformers_trainer", (), "transformers", marks=pytest.mark.nightly),
        pytest.param("lightning", (), "pytorch_lightning", marks=pytest.mark.nightly),
        pytest.param("accelerate_loop", (), "accelerate", marks=pytest.mark.nightly),
        pytest.param("monai_engine", (), "ignite", marks=pytest.mark.nightly),
    ],
)
def test_a_script_trains_alike_within_60_percent(
    run: Run, name: str, launch: tuple[str, ...], needs: str, tmp_path: Path
) -> None:
    pytest.importorskip(needs)
    script, cache = SCRIPTS / f"{name}.py", {"UCUDNN_CACHE": str(tmp_path / "cache")}
    own = read(run(*launch, script))
    first, second = (read(run(*WITHIN, "60%", "--", *launch, script, **cache)) for _ in range(2))
    assert len(own.losses) == 30
    for within in (first, second):
        assert within.losses == pytest.approx(own.losses, rel=1e-4, abs=1e-5)
        assert 0 < within.peak <= 0.6 * own.peak
    # One rank speaks. The second start plans nothing.
    assert any(re.search(r"planned in \d+ s, kept in", line) for line in first.said)
    assert any("follows the plan that is kept in" in line for line in second.said)
    assert not any("is planned within" in line for line in second.said)
    assert [*(tmp_path / "cache" / "plans").iterdir()]


SMALL = """
import torch
from torch import nn
torch.manual_seed(0)
def net(*last, inside=3):
    return nn.Sequential(
        nn.Conv2d(inside, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), *last)
pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten()
def images(n=16): return torch.randn(n, 3, 24, 24)
"""
GAN = """
one, other = net(*pooled, nn.Linear(8, 1)), net(nn.Conv2d(8, 3, 5, padding=4))
for _ in range(3):
    one(images()).mean().backward()
    loss = one(other(images())).mean()
    loss.backward()
    print("loss", loss.item())
"""
TWICE = """
one = net(*pooled)
for _ in range(3):
    first, second = one(images()), one(images())
    loss = (first - second).square().mean()
    loss.backward()
    print("loss", loss.item())
"""
IN_PARTS = """
one, other = net(), nn.Sequential(*pooled, nn.Linear(8, 4))
for _ in range(3):
    loss = other(one(images())).square().mean()
    loss.backward()
    print("loss", loss.item())
"""
# The first forward asks for sizes, with a batch of one; gradients stay.
SIZES_FIRST = """
one = net(*pooled)
one(torch.zeros(1, 3, 24, 24)).shape
optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
for _ in range(3):
    loss = one(images()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    print("loss", loss.item())
"""
COMPILED_SIZES_FIRST = SIZES_FIRST.replace(
    "one = net(*pooled)", 'one = torch.compile(net(*pooled), backend="aot_eager")'
)
# Three models, one after the other; the first is not used before its sizes are known.
FOLDS = """
for fold in range(2):
    torch.manual_seed(fold)
    one = nn.Sequential(net(), *pooled, nn.LazyLinear(4) if fold == 0 else nn.Linear(8, 4))
    for _ in range(3):
        loss = one(images()).square().mean()
        loss.backward()
        one.zero_grad()
        print("loss", loss.item())
"""
# The optimiser that trains is inside of another one, and its state is made by its own first step.
WRAPPED = """
class Wrapper(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})
    def step(self):
        self.inner.step()
one = net(*pooled)
optimizer = Wrapper(torch.optim.SGD(one.parameters(), lr=0.5, momentum=0.9))
for _ in range(4):
    loss = one(images()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    print("loss", loss.item())
"""
FUNCTIONAL = """
one = net(*pooled)
def loss(parameters, x):
    return torch.func.functional_call(one, parameters, (x,)).square().mean()
for _ in range(2):
    gradients = torch.func.grad(loss)(dict(one.named_parameters()), images())
    print("loss", gradients["0.bias"].sum().item())
"""
OWN_PLAN = """
import ucudnn
one = net(*pooled)
plan = ucudnn.tune(one, images(), ucudnn.Config(policy="undivided"))
print(plan.memory.budget_bytes > 0, ucudnn.convert_(one, plan).segments == ())
print("loss", one(images()).mean().item())
"""
COMPILED = """
one = net(*pooled)
step = torch.compile(one)
one.eval()
with torch.no_grad():
    step(images(2))
one.train()
for _ in range(3):
    loss = step(images()).square().mean()
    loss.backward()
    print("loss", loss.item())
"""
WITHOUT_STEPS = """
with torch.no_grad():
    print("loss", net(*pooled)(images()).mean().item())
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (GAN, ["is planned", "Sequential runs beside it in a step"]),
        (TWICE, ["is planned", "a step calls it several times before its backward"]),
        pytest.param(
            *(IN_PARTS, ["is planned", "Sequential runs beside it in a step"]),
            marks=pytest.mark.nightly,
        ),
        (SIZES_FIRST, ["is planned", "this step differs from the first", "is planned"]),
        (COMPILED_SIZES_FIRST, ["is planned", "this step differs from the first", "is planned"]),
        (FOLDS, ["is planned", "follows the plan"]),
        (WRAPPED, ["is planned"]),
        pytest.param(FUNCTIONAL, [], marks=pytest.mark.nightly),
        (OWN_PLAN, []),
        (WITHOUT_STEPS, []),
        pytest.param(COMPILED, ["is planned"], marks=pytest.mark.nightly),
    ],
    ids=[
        "gan",
        "twice",
        "in parts",
        "sizes first",
        "compiled, sizes first",
        "folds",
        "wrapped",
        "functional",
        "own plan",
        "no steps",
        "compiled",
    ],
)
def test_what_is_no_step_of_one_module_goes_on_as_torch(
    run: Run, tmp_path: Path, code: str, said: list[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SMALL + code)
    environment = {"UCUDNN_CACHE": str(tmp_path / "cache")}
    own = (
        read(run(script, **environment, UCUDNN_MEMORY_BUDGET="")) if code is not OWN_PLAN else None
    )
    within = read(run(*WITHIN, "90%", "--", script, **environment))
    if own is not None:
        assert within.losses == pytest.approx(own.losses, rel=1e-4)
    told = [line for line in within.said if "planning" not in line]
    kinds = [
        line for line in told if re.search("is planned|follows|no memory budget|differs", line)
    ]
    assert len(kinds) == len(said), told
    assert all(one in line for one, line in zip(said, kinds, strict=True)), told


def test_a_budget_that_cannot_be_kept_ends_the_script_before_its_first_step(
    run: Run, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SMALL + IN_PARTS)
    done = run(*WITHIN, "4KiB", "--", script, UCUDNN_CACHE=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "Sequential cannot be planned within 4KiB" in done.stderr
    assert not [*tmp_path.rglob("*.plan.json")]


def test_ranks_of_which_one_cannot_plan_end_together(run: Run, tmp_path: Path) -> None:
    done = run(*WITHIN, "4KiB", "--", *RANKS, SCRIPTS / "ddp.py", UCUDNN_CACHE=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("cannot be planned within 4KiB") == 1


EXCHANGES = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
class Exchanging(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
    def forward(self, x):
        y = self.convolution(x).mean((2, 3))
        dist.all_reduce(total := y.detach().clone())
        return y * total
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Exchanging())
loss = model(torch.ones(4, 3, 9, 9)).sum()
loss.backward()
if dist.get_rank() == 0:
    print("loss", loss.item())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.nightly
def test_a_forward_that_waits_for_other_ranks_is_not_planned(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "exchanges.py"
    script.write_text(EXCHANGES)
    own = read(run(*RANKS, script))
    within = read(run(*WITHIN, "80%", "--", *RANKS, script, UCUDNN_CACHE=str(tmp_path / "cache")))
    assert within.losses == own.losses
    assert "exchanges tensors with other ranks" in within.said[-1]


@pytest.fixture
def divided(tmp_path: Path, one_thread: None) -> Path:
    """A plan with segments of the network of `unchanged/plain.py`."""
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
    norms = [nn.Sequential(nn.GroupNorm(4, width), nn.ReLU()) for width in (16, 32)]
    layers = [one for pair, c in zip(norms, convolutions, strict=True) for one in (c, *pair)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    config = ucudnn.Config(memory_budget="60%", policy="undivided", cache=str(tmp_path / "cache"))
    plan = ucudnn.tune(model, torch.randn(64, 3, 32, 32), config)
    assert plan.segments
    path = tmp_path / "b60.json"
    plan.save(path)
    return path


def test_a_plan_with_segments_is_followed_by_the_model_that_it_names(
    run: Run, divided: Path
) -> None:
    own = read(run(SCRIPTS / "plain.py"))
    for words, environment in (
        (("-m", "ucudnn", "run", "--plan", divided, "--", SCRIPTS / "plain.py"), {}),
        ((SCRIPTS / "plain.py",), {"UCUDNN_PLAN": str(divided)}),
    ):
        by_plan = read(run(*words, **environment))
        assert by_plan.losses == pytest.approx(own.losses, rel=1e-4)
        assert 0 < by_plan.peak <= 0.6 * own.peak
        (line,) = by_plan.said
        assert f"Sequential follows {divided}: " in line
    done = run("-m", "ucudnn", "run", "--plan", divided, "--", SCRIPTS / "guarded.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"ucudnn.convert_(model, {os.fspath(divided)!r})" in done.stderr
    assert (
        "does not fit Net, the outermost module of this script: it is of Sequential" in done.stderr
    )
