"""Steps of a model in processes of their own, each of which times its kernels.

What a convolution takes depends on what malloc did before, so each setting gets a process that does
nothing else, as a training script would. `python -m ucudnn.cli.timed_steps` is that process: it
reads what to compute from the first line of its input, and computes a step for each further line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

from torch import Tensor
from torch.utils._pytree import tree_map_only

from ucudnn.backends import open_backend
from ucudnn.backends.torch_cpu.allocator import LARGE_THRESHOLD_TUNABLES
from ucudnn.benchmark.failures import first_line
from ucudnn.cli.targets import Recipe, name_model
from ucudnn.execution.stepping import STEP_ERRORS
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.races import StepTimes
from ucudnn.system.closing import AbstractClosable
from ucudnn.tuning.cliffs.step_times import Setting, TimedStep, interleaved

_MODULE = "ucudnn.cli.timed_steps"
_TUNABLES = "GLIBC_TUNABLES"


def times_in_processes(
    recipe: Recipe,
    backend: str,
    settings: Mapping[str, Setting],
    on_round: Callable[[int, int], None] = lambda *_: None,
) -> dict[str, StepTimes | str]:
    """Means of steps in several settings, each in a process of its own.

    A setting in which a step fails has the reason instead.

    Args:
        recipe: of the model.
        backend: by its name.
        settings: by the names that the result has; all others are compared with the first.
        on_round: as for `interleaved`.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        running = {
            name: stack.enter_context(_StepProcess(recipe, backend, one, folder / f"{name}.json"))
            for name, one in settings.items()
        }
        return interleaved({name: one.step for name, one in running.items()}, on_round)


class _StepProcess(AbstractClosable):
    """A process that computes steps of a model in one setting.

    Args:
        recipe: of the model.
        backend: by its name.
        setting: of the steps.
        path: a file for the plan.
    """

    def __init__(self, recipe: Recipe, backend: str, setting: Setting, path: Path) -> None:
        # It finds the same packages as this process; "" in sys.path is the current folder.
        paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = {**os.environ, "PYTHONPATH": paths}
        if setting.keeps_blocks:
            known = environment.get(_TUNABLES, "")
            # Of two values of one name the last counts.
            environment[_TUNABLES] = ":".join(filter(None, (known, LARGE_THRESHOLD_TUNABLES)))
        if setting.plan is not None:
            setting.plan.save(path)
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            # -P: otherwise `-m` puts the current folder first in sys.path.
            [sys.executable, "-P", "-m", _MODULE],
            env=environment,
            # Ctrl-C is for the process that asks, which ends this one.
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        asked = {"recipe": recipe._asdict(), "backend": backend}
        asked |= {"memory_format": setting.memory_format}
        self._ask({**asked, "plan": None if setting.plan is None else str(path)})

    def step(self) -> StepTimes:
        """Compute one step.

        Raises:
            RuntimeError: it fails, or the process has ended.
        """
        self._ask({})
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        times = json.loads(answer) if answer else None
        if times is None or "failure" in times:
            # It needs no memory any more, which the others may lack.
            self.close()
            raise RuntimeError(times["failure"] if times else "the process has ended")
        kernels = {Problem.from_dict(problem): ns for problem, ns in times["kernels_ns"]}
        return StepTimes(times["step_ns"], kernels)

    def _ask(self, what: object) -> None:
        assert self._process.stdin is not None
        # That the process has ended shows where its answer is missing.
        with suppress(BrokenPipeError):
            print(json.dumps(what), file=self._process.stdin, flush=True)

    def close(self) -> None:
        """End the process."""
        if self._process.returncode is None:
            self._process.kill()
            # It also closes the pipes.
            self._process.communicate()


def main() -> None:
    """Compute steps as asked for by standard input, until it ends."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        # What the model prints is no answer.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        _serve(sys.stdin, answers)


def _serve(questions: TextIO, answers: TextIO) -> None:
    asked, step = json.loads(questions.readline()), None
    for _ in questions:
        try:
            step = step or _made(asked)
            times = step()
            kernels = [(p.to_dict(), ns) for p, ns in times.kernels_ns.items()]
            found: dict[str, object] = {"step_ns": times.step_ns, "kernels_ns": kernels}
        except STEP_ERRORS as error:
            found = {"failure": first_line(error)}
        print(json.dumps(found), file=answers, flush=True)


def _made(asked: Mapping[str, Any]) -> TimedStep:
    """The step that is asked for."""
    recipe = Recipe(**{**asked["recipe"], "input": tuple(asked["recipe"]["input"])})
    named = name_model(recipe)
    named.fill()
    plan = None if asked["plan"] is None else Plan.load(asked["plan"])
    setting = Setting(asked["memory_format"], plan)
    backend = open_backend(asked["backend"])
    place = backend.device().type
    inputs = tree_map_only(Tensor, lambda one: one.to(place), named.examples)
    return TimedStep(named.module.to(place), inputs, backend, not recipe.infer, setting)


if __name__ == "__main__":
    main()
