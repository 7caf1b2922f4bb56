"""`ucudnn launch`: ranks by torchrun, MPS by a program that stands in, the number of ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ucudnn import config
from ucudnn.backends import open_backend
from ucudnn.distributed.counting import search
from ucudnn.distributed.launching import Launch, launch, mps_daemon
from ucudnn.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.nightly
STARTED = Path(__file__).with_name("started.py")
PATIENCE_S = 240
CLI = [sys.executable, "-m", "ucudnn", "launch"]
# A program that calls `launch` with arguments that the command line has not.
PROGRAM = (
    "import sys; from ucudnn.distributed.launching import Launch, launch; "
    "launch(sys.argv[2:], eval(sys.argv[1]), print)"
)
# Runs a script and ends at once: threads of gloo may abort a normal exit (pytorch#179291).
ENDING = (
    "import os, runpy, sys; sys.argv = sys.argv[1:]; "
    "sys.path.insert(0, os.path.dirname(sys.argv[0])); "
    "runpy.run_path(sys.argv[0], run_name='__main__'); sys.stdout.flush(); os._exit(0)"
)
# A rank that says who it is, and goes on until it is stopped.
FOREVER = """
import json, os, pathlib, signal, sys, time
folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
if "stubborn" in how:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
new = folder / f"{rank}.new"
new.write_text(json.dumps({"pid": os.getpid(), "environment": dict(os.environ)}))
new.rename(folder / f"{rank}.json")
while "die" in how and len(list(folder.glob("*.json"))) < 2:
    time.sleep(0.01)
if "die" in how and rank == "1":
    sys.exit(7)
if "end" not in how:
    time.sleep(600)
"""


class Launched:
    """A launcher at work.

    Args:
        folder: where its ranks write, and its temporary files are.
        process: of the launcher.
    """

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self.process = folder, process

    def said(self, ranks: int) -> list[dict[str, Any]]:
        """What the ranks wrote, as soon as all have."""
        paths = [self.folder / f"{rank}.json" for rank in range(ranks)]
        wait_until(lambda: all(path.exists() for path in paths) or self.process.poll() is not None)
        return [json.loads(path.read_text()) for path in paths]

    def end(self) -> tuple[int, str]:
        """Exit status and output."""
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, output

    def is_clean(self, said: list[dict[str, Any]]) -> bool:
        """Whether no rank and no file is left, after a moment."""
        pids = [one["pid"] for one in said]
        wait_until(lambda: not any(map(is_running, pids)), "a rank is left")
        return not list(self.folder.glob("ucudnn-*"))


def wait_until(condition: Any, otherwise: str = "it did not happen") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def is_running(process: int) -> bool:
    """Whether a process is there and is no zombie, which waits for a parent that may never look."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def begin(tmp_path: Path, package: Path):
    """Start a launcher; what is left of it at the end is killed."""
    begun: list[Launched] = []

    def start(words: list[str], **variables: str) -> Launched:
        environment = {**os.environ, "PYTHONPATH": str(package.parent), "TMPDIR": str(tmp_path)}
        environment.pop("OMP_NUM_THREADS", None)
        process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environment, **variables},
            text=True,
        )
        begun.append(Launched(tmp_path, process))
        return begun[-1]

    yield start
    for one in begun:
        one.process.kill()
        one.process.wait()
        assert one.process.stdout is not None
        one.process.stdout.close()


@pytest.fixture
def forever(tmp_path: Path) -> list[str]:
    """The script of ranks that go on for ever."""
    path = tmp_path / "forever.py"
    path.write_text(FOREVER)
    return [str(path), str(tmp_path)]


def test_ranks_divide_the_threads_and_get_the_weights_of_torchrun(begin, tmp_path):
    threads = str(len(os.sched_getaffinity(0)))
    words = [*CLI, "--ranks-per-gpu", "2", "--torchrun", "--max-restarts=1", "--"]
    job = begin([*words, str(STARTED), str(tmp_path), "by device"])
    status, output = job.end()
    assert status == 0, output
    said = job.said(2)
    assert all(1 <= int(one["threads"]) <= max(1, int(threads) // 2) for one in said)
    assert [one["ranks per device"] for one in said] == [2, 2]
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    alone = begin([*words, str(STARTED), str(tmp_path)])
    assert alone.end()[0] == 0
    assert {one["weights"] for one in [*said, *alone.said(2)]} == {said[0]["weights"]}


def test_two_ranks_lose_what_one_rank_with_the_whole_batch_loses(begin, tmp_path, repository):
    script = str(repository / "examples" / "ddp_resnet.py")
    options = ["--global-batch", "4", "--image", "32", "--steps", "4", "--policy", "undivided"]
    options += ["--frozen-norm", "--lr", "0.002"]
    losses = {}
    for ranks in (1, 2):
        plan = tmp_path / f"{ranks}.plan.json"
        words = [*CLI, f"--ranks-per-gpu={ranks}", "--device-workspace=32MiB", "--"]
        words += ["-c", ENDING, script]
        job = begin([*words, *options, "--save", str(plan)], UCUDNN_TIME_BUDGET_S="2")
        status, output = job.end()
        assert status == 0, output
        losses[ranks] = [float(text) for text in re.findall(r"loss (\d+\.\d+)", output)]
        document = json.loads(plan.read_text())
        assert document["conditions"]["ranks_per_device"] == ranks
        assert document["config"]["workspace_limit"] == (32 << 20) // ranks
    assert len(losses[1]) == 4
    assert losses[2] == pytest.approx(losses[1], abs=2e-4)
    # Or equal losses would show nothing: the weights do change.
    assert max(losses[1]) - min(losses[1]) > 1e-2


@pytest.mark.parametrize(("ranks", "how"), [("2", ""), ("2", "stubborn"), ("auto", "")])
def test_no_rank_is_left_when_the_launcher_is_to_end(begin, forever, ranks, how):
    words = [*CLI, f"--ranks-per-gpu={ranks}", "--", *forever, how]
    job = begin(words, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="3")
    # A search begins with one rank.
    said = job.said(1 if ranks == "auto" else 2)
    assert all(is_running(one["pid"]) for one in said)
    job.process.send_signal(signal.SIGTERM)
    status, output = job.end()
    assert status == 143, output
    assert job.is_clean(said)


def test_no_rank_is_left_when_one_dies(begin, forever):
    job = begin([*CLI, "--ranks-per-gpu=2", "--", *forever, "die"])
    said = job.said(2)
    status, output = job.end()
    assert status == 1
    assert "rank 1 ended with exit status 7, and the others were stopped" in output
    assert job.is_clean(said)


# --- MPS, by a program that stands in for NVIDIA's

CONTROL = """#!{python}
import os, pathlib, signal, subprocess, sys, time
log = pathlib.Path({log!r})
mode = {mode!r}
pipes = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
pid = pipes / "nvidia-cuda-mps-control.pid"
command = sys.argv[1:] or [sys.stdin.read().strip()]
with log.open("a") as stream:
    print(*command, os.environ.get("CUDA_VISIBLE_DEVICES", ""), file=stream)
def lives():
    try:
        return pathlib.Path(f"/proc/{{pid.read_text()}}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
if mode == "hang":
    time.sleep(600)
if command == ["-d"]:
    if mode == "refuse":
        sys.exit("Cannot create a daemon: operation not permitted")
    if mode == "mute":
        sys.exit()
    words = [sys.executable, "-c", "import time; time.sleep(600)", "nvidia-cuda-mps-control -d"]
    daemon = subprocess.Popen(words, start_new_session=True)  # it keeps our output open
    pid.write_text(str(daemon.pid))
elif mode == "mute" or not lives():
    sys.exit("Cannot find MPS control daemon process")
elif command[0].startswith("quit"):
    os.kill(int(pid.read_text()), signal.SIGTERM)
"""


@pytest.fixture
def control(tmp_path: Path):
    """Write a control program; its path and the log of its commands."""

    def write(mode: str = "") -> tuple[Path, Path]:
        path, log = tmp_path / "nvidia-cuda-mps-control", tmp_path / "control.log"
        path.write_text(CONTROL.format(python=sys.executable, log=str(log), mode=mode))
        path.chmod(0o755)
        return path, log

    return write


def settings(control: Path, mode: str = "require") -> str:
    return repr(Launch(2, mode, 60, str(control), gpus=("GPU-a", "GPU-b")))


def test_mps_is_started_asked_used_and_stopped(begin, control, forever):
    path, log = control()
    job = begin([sys.executable, "-c", PROGRAM, settings(path), *forever, "end"])
    status, output = job.end()
    assert status == 0, output
    said = job.said(4)
    for one in said:
        environment = one["environment"]
        assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "60"
        assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
        assert environment[config.RANKS_PER_DEVICE] == "2"
        assert not Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).exists()
    commands = [line.split() for line in log.read_text().splitlines()]
    assert commands[0] == ["-d", "GPU-a,GPU-b"]
    assert commands[1][0] == "get_server_list"
    assert commands[-1][0] == "quit"
    assert job.is_clean(said)
    assert "each rank may use up to 60 % of its GPU by MPS" in output


def test_mps_ends_with_a_launcher_that_is_to_end(begin, control, forever):
    path, log = control()
    job = begin([sys.executable, "-c", PROGRAM, settings(path), *forever, ""])
    said = job.said(4)
    job.process.send_signal(signal.SIGTERM)
    job.end()
    assert job.is_clean(said)
    assert log.read_text().splitlines()[-1].startswith("quit")


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("refuse", "-d is not allowed to start here: Cannot create a daemon: operation not"),
        ("mute", "started a daemon that does not answer"),
        ("hang", "-d is not allowed to start here: it did not end"),
    ],
)
def test_mps_that_is_not_to_be_had_is_refused_with_a_sentence(control, mode, sentence):
    path, log = control(mode)
    with pytest.raises(UnsupportedError, match=sentence), mps_daemon(str(path), answer_s=1):
        pass
    # Whatever it has started is told to end.
    assert log.read_text().splitlines()[-1].startswith("quit")


def test_without_the_control_program_ranks_take_turns_or_mps_is_refused(begin, forever, tmp_path):
    missing = tmp_path / "missing"
    job = begin([sys.executable, "-c", PROGRAM, settings(missing, "auto"), *forever, "end"])
    status, output = job.end()
    assert status == 0, output
    assert "the ranks of a GPU take turns, without MPS" in output
    assert "CUDA_MPS_PIPE_DIRECTORY" not in job.said(4)[0]["environment"]
    job = begin([sys.executable, "-c", PROGRAM, settings(missing), *forever, "end"])
    status, output = job.end()
    assert status == 1
    assert "missing is not on the PATH" in output


def test_mps_needs_a_gpu():
    with pytest.raises(UnsupportedError, match="torch sees none here; use --mps auto"):
        launch(["train.py"], Launch(2, mps="require", gpus=()))


# --- what each rank gets


def test_ranks_per_device_are_conditions_of_a_measurement(monkeypatch):
    backend = open_backend("torch_cpu")
    assert backend.conditions().ranks_per_device == 1
    monkeypatch.setenv(config.RANKS_PER_DEVICE, "4")
    assert backend.conditions().ranks_per_device == 4
    for text in ("0", "two", "-1"):
        monkeypatch.setenv(config.RANKS_PER_DEVICE, text)
        with pytest.raises(ConfigError, match="must be a number above 0"):
            backend.conditions()


# --- the number of ranks


@pytest.mark.parametrize(
    ("speeds", "chosen", "asked"),
    [
        ({1: [100.0], 2: [150.0], 4: [120.0]}, 2, [1, 2, 4, 4, 2, 1, 1, 2, 4]),
        # A larger number must gain more than the noise.
        ({1: [100.0], 2: [102.0], 4: [102.5]}, 1, [1, 2, 4, 4, 2, 1, 1, 2, 4]),
        # One lucky trial is not enough: the median counts.
        ({1: [100.0], 2: [90.0, 200.0, 90.0], 4: [80.0]}, 1, [1, 2, 4, 4, 2, 1, 1, 2, 4]),
        # Memory has ended.
        ({1: [100.0], 2: [150.0], 4: [None]}, 2, [1, 2, 4, 2, 1, 1, 2]),
        ({1: [100.0], 2: [None], 4: [300.0]}, 1, [1, 2, 1, 1]),
    ],
)
def test_the_number_of_ranks_with_most_samples_per_second_is_found(speeds, chosen, asked):
    taken = {ranks: cycle(rates) for ranks, rates in speeds.items()}
    measure = Mock(side_effect=lambda ranks: next(taken[ranks]))
    assert search(measure, rounds=3) == chosen
    assert [call.args[0] for call in measure.call_args_list] == asked


def test_a_script_that_does_not_run_is_told():
    with pytest.raises(UnsupportedError, match="or does not call ucudnn.distributed.count"):
        search(lambda _: None)


# Its speed depends on the number of ranks alone, not on the machine: each rank waits.
COUNTING = """
import os, sys, time
from ucudnn import config, distributed
ranks = config.ranks_per_device()
if ranks == 4:
    sys.exit("out of memory")
for _ in range(1_000_000 if config.progress_folder() else 1):
    time.sleep(0.1 if ranks == 1 else 0.12)
    distributed.count(10)
print(f"trained by {ranks}")
"""


def test_auto_finds_and_uses_the_number(begin, tmp_path):
    script = tmp_path / "counting.py"
    script.write_text(COUNTING)
    options = ["--ranks-per-gpu=auto", "--trial-seconds=2", "--trial-rounds=1"]
    job = begin([*CLI, *options, "--", str(script)])
    status, output = job.end()
    assert status == 0, output
    assert "--ranks-per-gpu 2 is used" in output
    assert output.count("trained by 2") == 2
    assert "4 rank(s) per device: failed" in output
    rates = {
        int(k): float(r) for k, r in re.findall(r"(\d) rank.s. per device: ([\d.]+) s", output)
    }
    assert rates[1] == pytest.approx(100, rel=0.3)
    assert rates[2] > 1.3 * rates[1]
    assert not list(tmp_path.glob("ucudnn-*"))
