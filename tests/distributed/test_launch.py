"""`ucudnn launch`: places, a clean end however it ends, and MPS by a program that stands in."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn import config
from ucudnn.backends import open_backend
from ucudnn.distributed import counting
from ucudnn.distributed.affinity import cores
from ucudnn.distributed.counting import count, read_counts
from ucudnn.distributed.launching import search, utilization
from ucudnn.distributed.launching.agent import Launch, launch
from ucudnn.distributed.launching.placement import place
from ucudnn.errors import ConfigError, UnsupportedError
from ucudnn.solvers import divide
from ucudnn.system import mps
from ucudnn.system.mps import MpsDaemon

pytestmark = pytest.mark.nightly
STARTED = Path(__file__).with_name("started.py")
PATIENCE_S = 240
CLI = [sys.executable, "-m", "ucudnn", "launch"]
# A program that calls `launch` with arguments that the command line has not.
PROGRAM = (
    "import sys; from ucudnn.distributed.launching.agent import Launch, launch; "
    "launch(sys.argv[2:], eval(sys.argv[1]), print)"
)
# Runs a script and ends at once: threads of gloo may abort a normal exit (pytorch#179291).
ENDING = (
    "import os, runpy, sys; sys.argv = sys.argv[1:]; "
    "sys.path.insert(0, os.path.dirname(sys.argv[0])); "
    "runpy.run_path(sys.argv[0], run_name='__main__'); sys.stdout.flush(); os._exit(0)"
)
# A rank that says who it is, has a child, and goes on until it is stopped.
FOREVER = """
import json, os, pathlib, signal, subprocess, sys, time
folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
if "stubborn" in how:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
said = {"pids": [os.getpid(), child.pid], "environment": dict(os.environ)}
new = folder / f"{rank}.new"
new.write_text(json.dumps(said))
new.rename(folder / f"{rank}.json")
while "die" in how and len(list(folder.glob("*.json"))) < 2:
    time.sleep(0.01)
if "die" in how and rank == "1":
    sys.exit(7)
if "end" in how:
    child.kill()
    sys.exit(0)
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
        """Whether no rank, no child of one, no guard and no file is left, after a moment."""
        pids = [pid for one in said for pid in one["pids"]]
        wait_until(lambda: not any(map(is_running, pids)), "a rank or its child is left")
        folders = self.folder.glob("ucudnn-launch-*")
        wait_until(lambda: not list(folders), "the job's folder is left")
        wait_until(lambda: not processes_with(str(self.folder)), "a process of the job is left")
        return True


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


def processes_with(text: str) -> list[str]:
    """Command lines of processes that contain a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command and is_running(int(path.parent.name)):
            found.append(command)
    return found


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


def test_ranks_get_disjoint_cores_and_the_weights_of_torchrun(begin, tmp_path):
    if len(cores()) < 2:
        pytest.skip("ranks cannot have cores of their own: there is one")
    job = begin([*CLI, "--ranks-per-gpu", "2", "--", str(STARTED), str(tmp_path), "by device"])
    status, output = job.end()
    assert status == 0, output
    said = job.said(2)
    assert not set(said[0]["cpus"]) & set(said[1]["cpus"])
    assert sorted(said[0]["cpus"] + said[1]["cpus"]) == sorted(os.sched_getaffinity(0))
    assert [one["threads"] for one in said] == [str(len(cores()) // 2)] * 2
    assert [one["ranks per device"] for one in said] == [2, 2]
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    alone = begin([*words, str(STARTED), str(tmp_path)])
    assert alone.end()[0] == 0
    # One device, so one level: the same sums.
    assert {one["weights"] for one in [*said, *alone.said(2)]} == {said[0]["weights"]}
    assert not list(tmp_path.glob("ucudnn-*"))


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


@pytest.mark.parametrize("how", ["", "stubborn"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_nothing_is_left_when_the_launcher_gets_a_signal(begin, forever, number, how):
    job = begin(
        [*CLI, "--ranks-per-gpu=2", "--", *forever, how], TORCH_ELASTIC_SHUTDOWN_TIMEOUT="3"
    )
    said = job.said(2)
    assert all(is_running(pid) for one in said for pid in one["pids"])
    job.process.send_signal(number)
    status, output = job.end()
    assert status == (143 if number == signal.SIGTERM else -signal.SIGKILL), output
    assert job.is_clean(said)


def test_nothing_is_left_when_a_rank_dies(begin, forever):
    job = begin([*CLI, "--ranks-per-gpu=2", "--", *forever, "die"])
    said = job.said(2)
    status, output = job.end()
    assert status == 1
    assert "rank 1 ended with exit status 7, and the others were stopped" in output
    assert job.is_clean(said)


def test_nothing_is_left_when_ranks_cannot_start(begin, tmp_path):
    job = begin([*CLI, "--ranks-per-gpu=2", "--", str(tmp_path / "no.py")])
    status, output = job.end()
    assert status == 1
    assert "No such file" in output
    assert job.is_clean([])


def test_a_launcher_that_is_killed_before_a_rank_registers(tmp_path, package):
    """The rank finds that the guard has cleaned up, and does not become the script."""
    program = package / "system" / "launched.py"
    words = [sys.executable, str(program), str(tmp_path / "gone"), "-c", "print('ran')"]
    ended = subprocess.run(words, capture_output=True, check=False, text=True)
    assert ended.returncode == 1
    assert "the launcher has ended" in ended.stderr
    assert not ended.stdout


def test_restarts_are_torchruns(begin, tmp_path):
    words = ["--ranks-per-gpu=2", "--torchrun", "--max-restarts=1"]
    job = begin([*CLI, *words, "--", str(STARTED), str(tmp_path), "die once"])
    status, output = job.end()
    assert status == 0, output
    assert [one["attempt"] for one in job.said(2)] == ["1", "1"]
    assert not list(tmp_path.glob("ucudnn-*"))


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
    words = [sys.executable, "-c", "import time; time.sleep(600)", "nvidia-cuda-mps-control -d"]
    daemon = subprocess.Popen(words, start_new_session=True)  # it keeps our output open
    pid.write_text(str(daemon.pid))
    (pipes.parent / "mps-log" / "control.log").write_text("[ERROR] no server\\n")
elif mode == "mute" or not lives():
    sys.exit("Cannot find MPS control daemon process")
elif command == ["quit"] and mode != "stubborn":
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


def daemons(tmp_path: Path) -> list[int]:
    """Daemons of the program that stands in, which are running."""
    return [
        int(path.read_text())
        for path in tmp_path.rglob("*.pid")
        if is_running(int(path.read_text()))
    ]


def settings(control: Path, mode: str = "require", percent: int = 60) -> str:
    return repr(Launch(2, mode, percent, str(control), gpus=("GPU-a", "GPU-b"))).replace(
        "torchrun_options=()", "torchrun_options=('--standalone',)"
    )


def test_mps_is_started_asked_used_and_stopped(begin, control, forever, tmp_path):
    path, log = control()
    job = begin([sys.executable, "-c", PROGRAM, settings(path), *forever, "end"])
    status, output = job.end()
    assert status == 0, output
    said = job.said(4)
    for rank, one in enumerate(said):
        environment = one["environment"]
        pipes = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
        assert pipes.parent.name.startswith("ucudnn-launch-")
        assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "60"
        # Neighbours share a GPU, which each of them sees alone, as number 0.
        assert environment["CUDA_VISIBLE_DEVICES"] == ("GPU-a", "GPU-b")[rank // 2]
        assert environment["LOCAL_RANK"] == "0"
        assert environment[config.RANKS_PER_DEVICE] == "2"
        assert not pipes.exists()
    commands = log.read_text().split("\n")
    assert commands[0].split() == ["-d", "GPU-a,GPU-b"]
    assert commands[1].split()[0] == "get_server_list"
    assert [line.split()[0] for line in commands if line][-1] == "quit"
    assert not daemons(tmp_path)
    assert job.is_clean(said)
    assert "2 rank(s) for each of 2 GPU(s), each with up to 60 % of it by MPS" in output


@pytest.mark.parametrize("mode", ["", "stubborn"])
def test_no_daemon_is_left_when_the_launcher_is_killed(begin, control, forever, tmp_path, mode):
    path, log = control(mode)
    job = begin([sys.executable, "-c", PROGRAM, settings(path), *forever, ""])
    said = job.said(4)
    (daemon,) = daemons(tmp_path)
    job.process.kill()
    assert job.is_clean(said)
    wait_until(lambda: not is_running(daemon), "the daemon is left")
    assert log.read_text().split("\n")[-2].split() == ["quit"]


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("refuse", "-d is not allowed to start here: Cannot create a daemon: operation not"),
        ("mute", r"started a daemon that does not answer: \[ERROR\] no server"),
        ("hang", "-d is not allowed to start here: it did not end"),
    ],
)
def test_mps_that_is_not_to_be_had_is_refused_with_a_sentence(
    control, monkeypatch, tmp_path, mode, sentence
):
    monkeypatch.setattr(mps, "_ANSWER_S", 1.0)
    path, _ = control(mode)
    daemon = MpsDaemon(tmp_path, ["GPU-a"], control=str(path))
    with pytest.raises(UnsupportedError, match=sentence):
        daemon.start()
    assert not daemon.is_alive()
    daemon.stop()
    assert not daemons(tmp_path)


def test_a_daemon_that_died_does_not_live_because_its_folder_does(control, tmp_path):
    path, _ = control()
    daemon = MpsDaemon(tmp_path, ["GPU-a"], control=str(path))
    daemon.start()
    assert daemon.is_alive()
    assert stat.S_IMODE(daemon.pipes.stat().st_mode) == 0o700
    assert daemon.stop()
    assert daemon.pipes.is_dir()
    assert not daemon.is_alive()


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
    assert not list(tmp_path.glob("ucudnn-launch-*"))


def test_mps_needs_a_gpu():
    with pytest.raises(UnsupportedError, match="torch sees none here; use --mps auto"):
        launch(["train.py"], Launch(2, mps="require", gpus=()))


# --- what each rank gets

CORES = st.lists(st.integers(1, 2), min_size=1, max_size=64)


@given(CORES, st.integers(1, 8))
def test_ranks_of_a_processor_have_cores_of_their_own_where_there_are_enough(widths, ranks):
    numbers = iter(range(sum(widths)))
    machine = [[next(numbers) for _ in range(width)] for width in widths]
    places = place(ranks, [], machine)
    assert len(places) == ranks
    used = [set(one.cpus) for one in places]
    assert set().union(*used) == set(range(sum(widths)))
    if ranks <= len(machine):
        assert sum(map(len, used)) == sum(widths)  # disjoint
        for cpus in used:
            # Whole cores, at least as many as the rank has threads.
            mine = [core for core in machine if set(core) <= cpus]
            assert {cpu for core in mine for cpu in core} == cpus
            assert len(mine) >= int(places[0].environment["OMP_NUM_THREADS"])


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 90)), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(0, 200),
)
def test_equal_parts_are_best_for_the_slowest_rank(points, ranks, budget):
    """No division of a device's workspace makes the slowest of equal ranks faster."""
    front = []
    for workspace, time_ns in [(0, 100), *sorted(points)]:
        if not front or (workspace > front[-1][0] and time_ns < front[-1][1]):
            front.append((workspace, time_ns))
    equal = min(time_ns for workspace, time_ns in front if workspace <= budget // ranks)
    divided = divide([front] * ranks, budget)
    slowest = max(front[choice][1] for choice in divided.choice)
    assert equal <= slowest


def test_the_workspace_of_a_device_is_divided():
    (one, *_) = place(4, [], [[0]], device_workspace=(64 << 20) + 3)
    assert one.environment["UCUDNN_WORKSPACE_LIMIT"] == str(16 << 20)
    assert "UCUDNN_WORKSPACE_LIMIT" not in place(4, [], [[0]])[0].environment


def test_ranks_per_device_are_conditions_of_a_measurement(monkeypatch):
    backend = open_backend("torch_cpu")
    assert backend.conditions().ranks_per_device == 1
    monkeypatch.setenv(config.RANKS_PER_DEVICE, "4")
    assert backend.conditions().ranks_per_device == 4
    for text in ("0", "two", "-1"):
        monkeypatch.setenv(config.RANKS_PER_DEVICE, text)
        with pytest.raises(ConfigError, match="must be a number above 0"):
            backend.conditions()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"ranks_per_device": 0}, "must be above 0, got 0"),
        ({"mps": "yes"}, "mps must be one of auto, require, off"),
        ({"mps_percent": 0}, "mps_percent must be from 1 to 100, got 0"),
        ({"ranks_per_device": 2, "device_workspace": 1}, "leaves none to each of 2 ranks"),
    ],
)
def test_settings_that_are_not_allowed_are_refused(values, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Launch(**values)


# --- how busy a GPU is


@pytest.mark.parametrize(
    ("percents", "ranks", "sentence"),
    [
        ([0, 0, 40, *[98] * 10], 1, "busy 98 % of the time with 1 rank: more ranks can hardly pay"),
        ([55] * 12, 2, "busy 55 % of the time with 2 ranks: try more, by --ranks-per-gpu auto"),
        ([98] * 4, 1, None),  # too short to tell
        (None, 1, None),  # NVML does not know the GPU
    ],
)
def test_the_launcher_tells_whether_sharing_can_pay(monkeypatch, percents, ranks, sentence):
    left = list(percents or [])
    empty = threading.Event()

    def used(board: object) -> SimpleNamespace:
        if not left:
            empty.set()
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(gpu=left.pop(0))

    def board(gpu: str) -> str:
        if percents is None:
            empty.set()
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return gpu

    monkeypatch.setattr(utilization, "_INTERVAL_S", 0.001)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", board)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", used)
    said: list[str] = []
    with utilization.Sampler(["GPU-a"], ranks, said.append) as sampler:
        assert empty.wait(60)
        sampler.conclude()
    assert said == ([f"GPU-a was {sentence}"] if sentence else [])


# --- the number of ranks


class Speeds:
    """Samples per second by number of ranks, and the order in which they are asked for."""

    def __init__(self, **speeds: list[float | None]) -> None:
        self.speeds = {int(name[1:]): list(taken) for name, taken in speeds.items()}
        self.asked: list[int] = []

    def __call__(self, ranks: int) -> float | None:
        self.asked.append(ranks)
        taken = self.speeds[ranks]
        return taken.pop(0) if len(taken) > 1 else taken[0]


@pytest.mark.parametrize(
    ("speeds", "chosen", "asked"),
    [
        ({"k1": [100.0], "k2": [150.0], "k4": [120.0]}, 2, [1, 2, 4, 4, 2, 1, 1, 2, 4]),
        # A larger number must gain more than the noise.
        ({"k1": [100.0], "k2": [102.0], "k4": [102.5]}, 1, [1, 2, 4, 4, 2, 1, 1, 2, 4]),
        # One lucky trial is not enough: the median counts.
        ({"k1": [100.0], "k2": [90.0, 200.0, 90.0], "k4": [80.0]}, 1, None),
        # Memory has ended.
        ({"k1": [100.0], "k2": [150.0], "k4": [None]}, 2, [1, 2, 4, 2, 1, 1, 2]),
        ({"k1": [100.0], "k2": [None], "k4": [300.0]}, 1, [1, 2, 1, 1]),
        # Far behind: larger ones are not tried.
        ({"k1": [100.0], "k2": [60.0], "k4": [300.0]}, 1, [1, 2, 2, 1, 1, 2]),
    ],
)
def test_the_number_of_ranks_with_most_samples_per_second_is_found(speeds, chosen, asked):
    measure = Speeds(**speeds)
    assert search.search(measure, rounds=3).ranks_per_device == chosen
    assert asked is None or measure.asked == asked


def test_a_script_that_does_not_run_is_told():
    with pytest.raises(UnsupportedError, match="or does not call ucudnn.distributed.count"):
        search.search(lambda _: None)


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
        int(k): float(r)
        for k, r in re.findall(r"^(\d) rank.s. per device: ([\d.]+) s", output, re.M)
    }
    assert rates[1] == pytest.approx(100, rel=0.3)
    assert rates[2] > 1.3 * rates[1]
    assert not list(tmp_path.glob("ucudnn-*"))


def test_ranks_count_where_a_trial_reads(monkeypatch, tmp_path):
    count(5)  # outside of a trial it does nothing
    monkeypatch.setenv(config.PROGRESS, str(tmp_path))
    for rank in (0, 12):
        monkeypatch.setenv("RANK", str(rank))
        counting._counter.cache_clear()  # as in another process
        for _ in range(rank + 1):
            count(8)
    (tmp_path / "3").touch()  # one that has only begun
    assert {rank: one.samples for rank, one in read_counts(tmp_path).items()} == {0: 8, 12: 13 * 8}
    with pytest.raises(ConfigError, match="must not be negative, got -1"):
        count(-1)
    counting._counter.cache_clear()


def test_auto_is_for_one_host():
    with pytest.raises(ConfigError, match="found on one host"):
        search.find_ranks(["train.py"], Launch(torchrun_options=("--nnodes=2",)))
