"""Run everything that is worth its time on one GPU, most valuable first, and end with one page.

    make gpu GPU_MINUTES=30
    python benchmarks/gpu_run.py --minutes 30     # the same, with PYTHONPATH set to the checkout

Tests on the GPU, tables of the kernels of AlexNet, ResNet-50 and nnU-Net, training steps of a 3-D
U-Net and of ResNet-50, then gpu_tables.py: tables.md says what was won, lost and not run. Each step
has a share of the time that is left and writes as it goes; what it leaves over goes to the next.
The same command again goes on where the time was over; remove tests.txt to run the tests again.
Results come into benchmarks/results/<gpu>, measurements into its folder cache; nothing is
installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TUNING_SHARE = 0.19  # of a step's time, for each of its plans
GRACE_S = 20  # a step ends by itself when its time is over; after this long it is killed
_ASK = "import torch; print(torch.cuda.get_device_name())"


@dataclass(frozen=True)
class Part:
    """One script to run.

    Args:
        name: for the log.
        weight: its share of the time, against those of the other parts.
        command: the script and its arguments.
        is_steps: True for training steps, False for gpu_suite.py: how it is told its time.
    """

    name: str
    weight: float
    command: tuple[str, ...]
    is_steps: bool = False

    def arguments(self, seconds: float) -> list[str]:
        """The command line for so much time."""
        if not self.is_steps:
            return [*self.command, "--seconds", f"{seconds:.0f}"]
        config = json.dumps({"time_budget_s": round(TUNING_SHARE * seconds, 1)})
        return [*self.command, "--minutes", f"{seconds / 60:.2f}", "--config", config]


def parts(out: Path, layers: Path, tiny: bool) -> list[Part]:
    """All parts, most valuable first."""
    suite, folder = "gpu_suite.py", str(out)
    tables = {name: str(layers / f"{name}.csv") for name in _TABLES}
    timings = ("--parts", "timings", "--dtypes", "fp32")
    steps = ("training_steps.py", "--out", folder, "--dtypes", "tf32", "--rounds", "7")
    steps += ("--tiny",) if tiny else ()
    images = ("--min-batch", "1" if tiny else "8")
    found = [
        Part(
            *("AlexNet and ResNet-50", 0.18),
            (suite, folder, tables[_ALEXNET], tables[_RESNET], *timings, *images),
        ),
        Part("nnU-Net", 0.08, (suite, folder, tables[_UNET], *timings)),
        Part(
            *("steps of a 3-D U-Net", 0.32),
            (*steps, "--networks", "unet3d", "--variants", _UNET_VARIANTS),
            is_steps=True,
        ),
        Part(
            *("steps of ResNet-50", 0.24),
            (*steps, "--networks", "resnet50", "--variants", _RESNET_VARIANTS),
            is_steps=True,
        ),
        Part(
            *("AlexNet in half precision", 0.06),
            (suite, folder, tables[_ALEXNET], *timings[:2], "--dtypes", "fp16", *images),
        ),
    ]
    if not (out / "tests.txt").exists():
        found.insert(0, Part("tests", 0.12, (suite, folder, tables[_ALEXNET], "--parts", "tests")))
    return found


_ALEXNET, _RESNET, _UNET = "alexnet_ucudnn_csv", "resnet50_n256", "nnunet_3d_fullres_n2"
_TABLES = (_ALEXNET, _RESNET, _UNET)
_UNET_VARIANTS = (
    "eager,benchmark,benchmark@all,channels_last,channels_last+benchmark,compile,"
    "ucudnn@none,ucudnn@64MiB"
)
_RESNET_VARIANTS = (
    "eager,channels_last,channels_last+benchmark,compile,ucudnn@64MiB,channels_last+ucudnn@64MiB"
)


def folder_name(device: str) -> str:
    """The folder of a device's results.

    >>> folder_name("NVIDIA GeForce RTX 4090"), folder_name("NVIDIA H200")
    ('geforce-rtx-4090', 'h200')
    """
    return re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia ")).strip("-")


def device_name() -> str:
    """The GPU's name, asked in a process that ends: a context takes memory and time slices."""
    asked = subprocess.run(
        [sys.executable, "-c", _ASK], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        sys.exit(f"torch sees no GPU here: {asked.stderr.strip().rpartition(chr(10))[2]}")
    return asked.stdout.strip()


def run(part: Part, seconds: float) -> None:
    """Run a part, and end it with all its processes where it does not end by itself."""
    arguments = part.arguments(seconds)
    print(f"\n=== {part.name}, {seconds:.0f} s: {' '.join(arguments)}", flush=True)
    process = subprocess.Popen(
        [sys.executable, str(HERE / arguments[0]), *arguments[1:]], start_new_session=True
    )
    try:
        process.wait(seconds + GRACE_S)
    except subprocess.TimeoutExpired:
        print(f"=== {part.name}: killed", flush=True)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        print(f"=== {part.name}: ended with {process.returncode}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<gpu>")
    parser.add_argument("--layers", type=Path, default=HERE / "layers", help="folder of the tables")
    parser.add_argument("--tiny", action="store_true", help="training steps of small networks")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * options.minutes
    out = options.out or HERE / "results" / folder_name(device_name())
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("UCUDNN_CACHE", str(out / "cache"))
    todo = parts(out, options.layers, options.tiny)
    for place, part in enumerate(todo):
        left = deadline - time.monotonic()
        weights = sum(one.weight for one in todo[place:])
        if left > 0:
            run(part, left * part.weight / weights)
    tables = subprocess.run(
        [sys.executable, str(HERE / "gpu_tables.py"), str(out)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    (out / "tables.md").write_text(tables.stdout)
    print(tables.stdout[tables.stdout.rfind("## Won") :])
    print(f"All tables are in {out / 'tables.md'}.")
    sys.exit(tables.returncode)


if __name__ == "__main__":
    main()
