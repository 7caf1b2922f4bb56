"""Record the convolutions that a process computes, and keep them as a table of layers.

A recorder stands where the runner of a plan does, below autograd and autocast, and lets torch
compute everything. Every process of a job adds its counts to the same file.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from filelock import FileLock
from torch import Tensor

from ucudnn.backends.tensors import problem_of
from ucudnn.execution.autograd import AbstractRunner, Bound, Geometry, Pass
from ucudnn.execution.override import Everything
from ucudnn.layer_table import Row, format_rows, read_rows
from ucudnn.problem import OPS, Problem
from ucudnn.system.files import write


class Recorder(AbstractRunner):
    """Counts convolutions, each by its pass, and plans none.

    >>> import torch
    >>> recorder, geometry = Recorder(), Geometry((1,), (0,), (1,), False, (0,), 1)
    >>> x, w = torch.ones(2, 3, 9), torch.ones(4, 3, 3)
    >>> _ = [recorder.bound(x, w, geometry).forward(x, w, None) for _ in range(2)]
    >>> [(row.name, str(row.problem), row.calls) for row in recorder.rows()]
    [('conv1', 'fprop conv1d(3->4, k3, 9) at batch 2', 2)]
    """

    filter_shapes = Everything()

    def __init__(self) -> None:
        super().__init__()
        # By problem, and by whether a bias was added to its result.
        self._counts: Counter[tuple[Problem, bool]] = Counter()

    def problems(self, x: Tensor, w: Tensor, geometry: Geometry) -> dict[str, Problem]:
        """All passes that could be planned."""
        found = {which: problem_of(which, x, w, *geometry) for which in OPS}
        return {which: problem for which, problem in found.items() if problem is not None}

    def bind(self, which: str, bound: Bound, has_bias: bool = False) -> Pass | None:
        """Count a call; it is not kept as looked up, so that the next one comes here, too."""
        with self._lock:
            self._counts[bound.problems[which], has_bias] += 1
        return None

    def clear(self) -> None:
        """Forget everything, as in a forked child, whose parent has the same counts."""
        self._counts.clear()

    def rows(self) -> list[Row]:
        """The convolutions so far, in the order of their first calls."""
        return _rows(self._counts)

    def save(self, path: str) -> None:
        """Add the counts to a table, which is made where there is none, and forget them.

        Raises:
            ConfigError: the file is no table of layers.
            OutputError: it cannot be written.
        """
        # DataLoader's workers and launchers compute none.
        if not self._counts:
            return
        # Ranks of a job end at the same time.
        with FileLock(lock_of(path)):
            counts: Counter[tuple[Problem, bool]] = Counter()
            for row in read_rows(path) if Path(path).exists() else ():
                counts[row.problem, row.has_bias] += row.calls
            # Those of the file first, which keep their names so.
            write(path, format_rows(_rows(counts + self._counts)).encode(), "the table of layers")
        self.clear()


def lock_of(path: str) -> Path:
    """The file by which processes take turns to write a table.

    >>> lock_of("/tmp/layers.csv")
    PosixPath('/tmp/.layers.csv.lock')
    """
    return Path(path).with_name(f".{Path(path).name}.lock")


def _rows(counts: Counter[tuple[Problem, bool]]) -> list[Row]:
    # Passes of one convolution have one name; modules have no names at this level.
    numbers: dict[Problem, int] = {}
    rows = []
    for (problem, has_bias), count in counts.items():
        number = numbers.setdefault(replace(problem, op="fprop"), len(numbers) + 1)
        rows.append(Row(f"conv{number}", problem, count, has_bias))
    return rows
