"""Steps of a network in a process whose malloc keeps large blocks, in turn with another process.

glibc returns large blocks to the operating system when they are freed, and each is paged in anew
when it is next allocated. With GLIBC_TUNABLES it keeps them. The setting is read when a process
starts, so that its steps need a process of their own. The two take turns: `MallocSteps` lets the
other process take one step by each way, and waits until it has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from found_steps import WAYS
from networks import example, shape_of
from steps import bench_steps

import ucudnn
from ucudnn.advice import LARGE_THRESHOLD_TUNABLES
from ucudnn.backends.torch_cpu.processor import describe_allocator

UNCOMPILED = [way for way in WAYS.values() if not way.is_compiled]
# OpenMP's threads stay awake for some milliseconds after the last of their work.
SETTLING_S = 0.02


class MallocSteps:
    """The other process. It sets up at once, while this one should do nothing else.

    Args:
        network: a name of networks.NETWORKS.
        shape: of its input.
        is_training: time training steps, else inference.
        plan: the file of a plan.
        rounds: the most.
    """

    def __init__(
        self, network: str, shape: tuple[int, ...], is_training: bool, plan: Path, rounds: int
    ) -> None:
        self._answer: dict[str, Any] = {}
        command = [sys.executable, __file__, network, "--input", "x".join(map(str, shape))]
        command += ["--plan", str(plan), "--rounds", str(rounds)]
        self._process = subprocess.Popen(
            [*command, *(["--training"] if is_training else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "GLIBC_TUNABLES": LARGE_THRESHOLD_TUNABLES},
            text=True,
            bufsize=1,
        )
        self._hear()

    def take_round(self, number: int) -> bool:
        """Let it take one step by each way; always True, whatever becomes of it."""
        if self._answer == {"ready": number}:
            self._ask("go")
        return True

    def result(self) -> dict[str, Any]:
        """End it; its setting, with its steps as JSON values or the reason why there are none."""
        if "ready" in self._answer:
            self._ask("end")
        self._process.kill()
        self._process.communicate()
        return {"setting": LARGE_THRESHOLD_TUNABLES, **self._answer}

    def _ask(self, word: str) -> None:
        assert self._process.stdin is not None
        # If it is gone, there is nothing to be read, which says so.
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{word}\n")
        self._hear()
        time.sleep(SETTLING_S)

    def _hear(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._answer = json.loads(line) if line else {"failed": f"exit {self._process.wait()}"}


def steps_with_malloc(
    network: str, shape: tuple[int, ...], is_training: bool, plan: Path, rounds: int
) -> MallocSteps | None:
    """A process with the setting; None unless this one runs on glibc's malloc as it comes."""
    if describe_allocator() != "glibc":
        return None
    return MallocSteps(network, shape, is_training, plan, rounds)


def main() -> None:
    """Take a round of steps whenever the caller says so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("network")
    parser.add_argument("--input", required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--training", action="store_true")
    options = parser.parse_args()
    # What libraries print must not reach the caller as an answer.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)

        def turn(number: int) -> bool:
            answers.write(json.dumps({"ready": number}) + "\n")
            return sys.stdin.readline() == "go\n"

        model, x = example(options.network, shape_of(options.input), options.training)
        plan = ucudnn.Plan.load(options.plan)
        bench = bench_steps(
            model,
            x,
            (plan, plan),
            UNCOMPILED,
            training=options.training,
            rounds=options.rounds,
            # The caller ends the rounds.
            enough_s=float("inf"),
            on_round=turn,
        )
        answers.write(json.dumps({"malloc": describe_allocator(), "bench": bench.to_dict()}) + "\n")


if __name__ == "__main__":
    main()
