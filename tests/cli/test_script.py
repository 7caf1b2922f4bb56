"""`ucudnn run` and `ucudnn record`: a script behaves as by plain Python, and follows a plan.

Everything here runs in processes of its own, beside plain Python where the two are compared.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import in_chunks

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.layer_table import read_rows
from ucudnn.plan import Plan
from ucudnn.steps.tracing import trace_layers

pytestmark = pytest.mark.process

TRAIN = """
import sys
import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1))

if __name__ == "__main__":
    net = model()
    for _ in range(3):
        net(torch.ones(4, 3, 9, 9)).sum().backward()
    print(net[0].weight.grad.sum().item())
"""
# Prints which algorithms computed something, at the end and on stderr.
SPY = """
import atexit, sys, torch
from ucudnn.execution import runner
used = set()
build = runner.build
def spied(backend, problem, split):
    used.update(chunk.algorithm for chunk in split.chunks)
    return build(backend, problem, split)
runner.build = spied
atexit.register(lambda: print("used", *sorted(used), file=sys.stderr))
"""
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def train(run: Run) -> Path:
    """A training script that knows nothing of ucudnn."""
    path = run.folder / "train.py"  # type: ignore[attr-defined]
    path.write_text(TRAIN)
    return path


@pytest.fixture
def plan(train: Path, one_thread: None) -> Path:
    """A plan of its model in which slow_conv2d computes every forward pass."""
    space: dict[str, object] = {"__name__": "train"}
    exec(TRAIN, space)
    config = ucudnn.Config(ops=("fprop",))
    layers = trace_layers(space["model"](), torch.ones(4, 3, 9, 9), config.ops).layers  # type: ignore[operator]
    path = train.with_name("plan.json")
    in_chunks(open_backend("torch_cpu"), layers, 4, lambda _: "slow_conv2d", config).save(path)
    return path


SPEAKING = """
import os, sys
class Thing: pass
print(sys.argv, __name__, __file__, sys.path[0], __spec__ and __spec__.name, __package__ or "")
print(sys.modules["__main__"].Thing is Thing, sorted(set(globals()) - {"__annotations__"})[-4:])
sys.stdout.flush()
"""
ENDINGS = {
    "well": "",
    "by a number": "sys.exit(7)",
    "by a sentence": "sys.exit('no data')",
    "by an error": "def load():\n    raise ValueError('bad')\nload()",
    "by an error of an error": "try:\n    1 / 0\nexcept ArithmeticError:\n    open('none')",
    "by Ctrl-C": "raise KeyboardInterrupt",
    "by a syntax error": "x = = 3",
    "at once": "os._exit(9)",
    "by its own hook": "sys.excepthook = lambda *e: print('hook', e[0].__name__)\n1 / 0",
    "after a handler": "import atexit\natexit.register(print, 'handler')\n1 / 0",
}


FILE, MODULE = ("script.py",), ("-m", "pkg.script")
# A module ends by the same code as a file, but for the frames of an error.
CASES = [
    *(pytest.param(FILE, ending, id=f"file {how}") for how, ending in ENDINGS.items()),
    *(
        pytest.param(
            *(MODULE, ending),
            id=f"module {how}",
            marks=() if "error" in how else pytest.mark.nightly,
        )
        for how, ending in ENDINGS.items()
    ),
]


@pytest.mark.parametrize(("how", "ending"), CASES)
def test_a_script_ends_as_by_python(
    run: Run, plan: Path, ending: str, how: tuple[str, ...]
) -> None:
    folder = plan.parent
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("")
    for path in (folder / "script.py", folder / "pkg" / "script.py"):
        path.write_text(SPEAKING + ending)
    plain = run(*how, "--lr", "3", "-x")
    ours = run("-m", "ucudnn", "run", "--plan", plan, "--", *how, "--lr", "3", "-x")
    assert ours.returncode == plain.returncode
    assert ours.stdout == plain.stdout
    # Python's own frames, of `-m`, are those of its start.
    assert without_runpy(ours.stderr) == without_runpy(plain.stderr)


def without_runpy(text: str) -> list[str]:
    lines, skipped = [], False
    for line in text.splitlines():
        if line.startswith("  File "):
            skipped = "<frozen " in line
        elif not line.startswith("    "):
            # Of a syntax error in a script there is nothing but frames of Python's start.
            skipped = line.startswith("Traceback")
        if not skipped:
            lines.append(line)
    return lines


def test_a_script_follows_the_plan(run: Run, train: Path, plan: Path) -> None:
    train.write_text(SPY + TRAIN)
    plain = run(train)
    by_command = run("-m", "ucudnn", "run", "--plan", plan, "--", train)
    by_variable = run(train, UCUDNN_PLAN=str(plan))
    assert plain.stderr == "used\n"
    assert "used slow_conv2d" in by_command.stderr, by_command.stderr
    assert by_variable.stderr == "used slow_conv2d\n"
    assert by_command.stdout == by_variable.stdout
    assert float(by_command.stdout) == pytest.approx(float(plain.stdout), rel=1e-4)


@pytest.mark.nightly
def test_ranks_of_torchrun_follow_it_too(run: Run, train: Path, plan: Path) -> None:
    """They are started by name."""
    train.write_text(SPY + TRAIN)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ranks = run("-m", "ucudnn", "run", "--plan", plan.name, "--", *launch, train)
    assert ranks.returncode == 0, ranks.stderr
    assert ranks.stderr.count("used slow_conv2d") == 2


def test_processes_of_multiprocessing_follow_it_too(run: Run, train: Path, plan: Path) -> None:
    train.write_text(SPY + TRAIN)
    parent = train.with_name("parent.py")
    parent.write_text(
        "import multiprocessing, train\n"
        "def work(): print(train.model()(train.torch.ones(4, 3, 9, 9)).shape)\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    child.start(); child.join(); raise SystemExit(child.exitcode)\n"
    )
    spawned = run("-m", "ucudnn", "run", "--plan", plan, "--", parent)
    assert spawned.returncode == 0, spawned.stderr
    assert spawned.stdout == "torch.Size([4, 4, 7, 7])\n"
    assert "used slow_conv2d" in spawned.stderr


def test_without_torchs_call_the_script_follows_it_all_the_same(
    run: Run, train: Path, plan: Path
) -> None:
    train.write_text(SPY + TRAIN)
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = run("-m", "ucudnn", "run", "--plan", plan, "--", train, **off)
    assert "used slow_conv2d" in done.stderr


def test_a_plan_that_is_not_there_or_for_another_device(run: Run, train: Path, plan: Path) -> None:
    missing = run("-m", "ucudnn", "run", "--plan", "none.json", "--", train)
    assert missing.returncode == 2
    assert missing.stderr.startswith("ucudnn: cannot read the plan none.json")
    by_variable = run(train, UCUDNN_PLAN="none.json")
    assert by_variable.returncode == 0
    assert "torch's own convolutions run, without UCUDNN_PLAN: cannot read" in by_variable.stderr
    assert "auto-loading" not in by_variable.stderr
    strict = run(train, UCUDNN_PLAN="none.json", UCUDNN_UNPLANNED="error")
    assert strict.returncode == 1
    (sentence,) = strict.stderr.splitlines()
    assert sentence.startswith("ucudnn: cannot read the plan none.json")
    made = ucudnn.Plan.load(plan)
    replace(made, device=replace(made.device, name="another processor")).save(plan)
    by_plan = ("-m", "ucudnn", "run", "--plan", plan, "--", train)
    other = run(*by_plan, UCUDNN_UNPLANNED="error")
    assert other.returncode == 1
    # It fails at the first convolution, and the traceback leads there.
    assert "train.py" in other.stderr
    assert "PlanError: unplanned='error' refuses a plan that does not hold here" in other.stderr
    left = run(*by_plan, UCUDNN_UNPLANNED="torch")
    assert left.returncode == 0
    assert left.stderr.count("torch's own convolutions run") == 1


def test_ucudnn_before_torch_says_that_the_variable_has_no_effect(run: Run, plan: Path) -> None:
    program = "import ucudnn.nn, torch"
    done = run("-c", program, UCUDNN_PLAN=str(plan))
    assert done.returncode == 0
    assert "have no effect in this process" in done.stderr


def test_commands_measure_torchs_own(run: Run, plan: Path, table: Callable[..., Path]) -> None:
    """A variable that was left set must not put the plan where torch's own is timed."""
    spied = run("-m", "ucudnn", "check", plan, "--json", UCUDNN_PLAN=str(plan))
    assert "no effect" not in spied.stderr
    assert json.loads(spied.stdout)["findings"]


def test_what_a_script_computes_is_recorded(run: Run, train: Path) -> None:
    done = run("-m", "ucudnn", "record", "--", train)
    assert done.returncode == 0, done.stderr
    assert "recorded 15 calls of 5 convolutions" in done.stderr
    space: dict[str, object] = {"__name__": "train"}
    exec(TRAIN, space)
    expected = ucudnn.trace(space["model"](), torch.ones(4, 3, 9, 9))  # type: ignore[operator]
    rows = read_rows(train.with_name("layers.csv"))
    assert sorted(map(str, expected)) == sorted(str(row.problem) for row in rows)
    assert {row.calls for row in rows} == {3}
    left = {path.name for path in train.parent.iterdir()}
    assert left - {"__pycache__"} == {"train.py", "layers.csv"}


SAVES_LATE = """
import atexit, pickle, threading, time
class Net: pass
def save(who):
    print(who, len(pickle.dumps(Net())) > 0)
def wait():
    threading.main_thread().join()
    save("thread")
threading.Thread(target=wait).start()
atexit.register(save, "at exit")
"""


@pytest.mark.parametrize("how", [("-m", "late"), ("late.py",)], ids=str)
def test_a_module_stays_main_until_the_process_ends(run: Run, train: Path, how: tuple[str]) -> None:
    train.with_name("late.py").write_text(SAVES_LATE)
    done = run("-m", "ucudnn", "record", "--", *how)
    assert sorted(done.stdout.splitlines()) == ["at exit True", "thread True"], done.stderr


def test_forked_workers_are_recorded(run: Run, train: Path) -> None:
    train.write_text(
        "import multiprocessing, torch\n"
        "def work(): torch.nn.Conv2d(3, 4, 1)(torch.ones(2, 3, 5, 5))\n"
        "context = multiprocessing.get_context('fork')\n"
        "workers = [context.Process(target=work) for _ in range(2)]\n"
        "for worker in workers: worker.start()\n"
        "for worker in workers: worker.join()\n"
        "work()\n"
    )
    done = run("-m", "ucudnn", "record", "--", train)
    assert "recorded 3 calls of 1 convolutions" in done.stderr


@pytest.mark.nightly
def test_ranks_add_to_one_table_also_where_one_fails(run: Run, train: Path) -> None:
    train.write_text(TRAIN + "import os\nif os.environ['RANK'] == '1': raise ValueError('late')\n")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = run("-m", "ucudnn", "record", "-o", "all.csv", "--", *launch, train)
    assert done.returncode == 1
    rows = read_rows(train.with_name("all.csv"))
    # torchrun may end a rank while it writes.
    assert {row.calls for row in rows} <= {3, 6}
    assert len(rows) == 5


def test_what_computes_nothing_leaves_no_table(run: Run, train: Path) -> None:
    train.write_text("print('nothing')")
    old = train.with_name("layers.csv")
    old.write_text("of another run")
    done = run("-m", "ucudnn", "record", "--", train)
    assert (done.returncode, done.stdout) == (0, "nothing\n")
    assert "no convolution was computed" in done.stderr
    assert not old.exists()


def test_bad_calls(
    ucudnn: Callable[..., Any], train: Path, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(train.parent)
    divided = train.with_name("divided.json")
    replace(Plan.load(plan), micro_batch=2).save(divided)
    for words, said in (
        (
            ("run", "--plan", divided, "--", train),
            "for part in plan.micro_batches(images, labels):",
        ),
        (("run", "--plan", plan, "--", "none.py"), "a script that exists"),
        (("record", "--outptu", train), "a script that exists, or -m MODULE, got '--outptu'"),
        (("run", "--", train), "--plan FILE is needed, which `ucudnn tune -o` writes, or --mem"),
        (("run", "--memory-budget", "lots", "--", train), "--memory-budget must be a number of by"),
        (("run", "--plan", plan, "--memory-budget", "50%", "--", train), "leave one out"),
        (("run", "--plan", plan, "--", "-m"), "the name of a module"),
        (("run", "--plan", plan, "--", "torchrun", train), "or -m torch.distributed.run, got"),
        (("record", "-o", "nowhere/layers.csv", "--", train), "a folder that exists"),
    ):
        done = ucudnn(*words)
        assert done.status == 2, words
        assert said in done.err, words
