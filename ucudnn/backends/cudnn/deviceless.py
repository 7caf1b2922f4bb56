"""A child process in which cuDNN plans for a device of another machine, and requests to it.

The child imports no framework. Without an NVIDIA driver, it loads stubs in place of the driver. A
process with the stubs must not contain anything that may use a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NamedTuple

from ucudnn.backends.cudnn.api import Cudnn
from ucudnn.backends.cudnn.driverless import has_driver, load_stubs
from ucudnn.backends.cudnn.engine import Configuration, configurations
from ucudnn.backends.cudnn.graph import Target, View, Views
from ucudnn.backends.cudnn.library import find_library
from ucudnn.backends.cudnn.profile import DeviceProfile
from ucudnn.errors import UcudnnError, UnsupportedError
from ucudnn.problem import Problem

# By name, because `__name__` is "__main__" in the child.
_MODULE = "ucudnn.backends.cudnn.deviceless"


class Listing(NamedTuple):
    """cuDNN's configurations of a problem.

    Args:
        problem: the convolution.
        configurations: the configurations, best first; empty if cuDNN has no engine.
        refusal: why there is none; "" if there are some.
        cudnn_version: such as "9.28.0".
    """

    problem: Problem
    configurations: tuple[Configuration, ...]
    refusal: str
    cudnn_version: str


def list_configurations(
    problems: Sequence[Problem],
    profile: DeviceProfile,
    library: Path | None = None,
    views: Mapping[Problem, Views] | None = None,
) -> Iterator[Listing]:
    """List every problem's configurations on a device that need not be here, in order.

    Args:
        problems: the convolutions.
        profile: the device.
        library: libcudnn; None: the one that torch would use.
        views: layouts in memory of the tensors of some problems; others are contiguous.

    Raises:
        UnsupportedError: there is no cuDNN, it is too old or does not know the device, or there is
            no C compiler to build the stubs.
    """
    request = {
        "library": str(library or find_library()),
        "profile": {"text": profile.text, "source": profile.source},
        "problems": [
            {"problem": problem.to_dict(), "views": (views or {}).get(problem)}
            for problem in problems
        ],
    }
    # One child for all problems, so that cuDNN is loaded once.
    answers = _ask(request)
    for problem, answer in zip(problems, answers, strict=True):
        found = (Configuration(**{**one, "notes": tuple(one["notes"])}) for one in answer["found"])
        yield Listing(problem, tuple(found), answer["refusal"], answer["cudnn"])


def _ask(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Start the child, send it a request and yield its answers."""
    # The child finds the same packages as this process; "" in sys.path is the current folder.
    paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    # A file, not a pipe: a child that writes more than a pipe holds would wait for a reader.
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(  # noqa: S603 - our own module, with paths of ours
            # -P: otherwise `-m` puts the current folder first in sys.path.
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env={**os.environ, "PYTHONPATH": paths},
            text=True,
        )
        with child:
            try:
                yield from _answers(child, request)
            finally:
                child.kill()  # does nothing where it has ended
        said.seek(0)
        if child.returncode:
            raise UnsupportedError(
                f"the process in which cuDNN plans ended with status {child.returncode}: "
                f"{said.read().strip() or 'it said nothing'}"
            )


def _answers(child: subprocess.Popen[str], request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    assert child.stdin is not None
    assert child.stdout is not None
    with suppress(BrokenPipeError), child.stdin as stream:  # its exit status says why
        json.dump(request, stream)
    for line in child.stdout:
        answer: dict[str, Any] = json.loads(line)
        # The child's expected errors; anything else ends it with a traceback on stderr.
        if "error" in answer:
            raise UnsupportedError(answer["error"])
        yield answer
    child.wait()


def main() -> None:
    """Main function of the child: read a request, answer one line per problem."""
    # What libraries print must not get between the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        try:
            _serve(json.load(sys.stdin), answers)
        except UcudnnError as error:
            answers.write(json.dumps({"error": str(error)}) + "\n")


def _serve(request: dict[str, Any], answers: IO[str]) -> None:
    # With a real driver no stub is needed, and cuDNN works on the profile all the same.
    if not has_driver():
        load_stubs()
    cudnn = Cudnn(request["library"])
    profile = DeviceProfile.parse(**request["profile"])
    with profile.descriptor(cudnn) as device:
        target = Target(cudnn, device=device)
        for entry in request["problems"]:
            problem = Problem.from_dict(entry["problem"])
            views = entry["views"] and Views(
                *(View(tuple(strides), alignment) for strides, alignment in entry["views"])
            )
            answer: dict[str, Any] = {"found": [], "refusal": "", "cudnn": cudnn.version_text}
            try:
                found = configurations(target, problem, views=views)
                answer["found"] = [asdict(one) for one in found]
            except UnsupportedError as error:
                answer["refusal"] = str(error)
            answers.write(json.dumps(answer) + "\n")
            # One line at a time, so that the parent can report progress.
            answers.flush()


if __name__ == "__main__":
    main()
