"""Errors: one base class; they survive the way from a worker process."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
from pathlib import Path

import pytest

import ucudnn
from ucudnn import errors
from ucudnn.errors import PlanError, RankError, UcudnnError

CLASSES = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if value.__module__ == errors.__name__
    # Python's own base of interruptions is none of ours.
    and not issubclass(value, (UserWarning, KeyboardInterrupt))
]


@pytest.mark.parametrize("error", CLASSES)
@pytest.mark.parametrize("duplicate", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_every_error_is_ours_and_survives_pickling_and_copying(error, duplicate) -> None:
    assert issubclass(error, UcudnnError)
    again = duplicate(error("the smallest needs 9 MiB"))
    assert type(again) is error
    assert str(again) == "the smallest needs 9 MiB"


@pytest.mark.parametrize("smallest_bytes", [9 << 20, 0, None])
def test_plan_error_keeps_the_smallest_workspace(smallest_bytes: int | None) -> None:
    again = pickle.loads(pickle.dumps(PlanError("nothing fits", smallest_bytes)))
    assert again.smallest_bytes == smallest_bytes
    assert str(again) == "nothing fits"


def test_rank_error_keeps_the_ranks() -> None:
    again = pickle.loads(pickle.dumps(RankError("ranks 1 and 3 do not answer", (1, 3))))
    assert again.ranks == (1, 3)
    assert str(again) == "ranks 1 and 3 do not answer"


def test_misuse_is_also_a_value_error() -> None:
    assert issubclass(errors.ProblemError, ValueError)
    assert issubclass(errors.ConfigError, ValueError)


def test_every_warning_has_one_base(package: Path) -> None:
    """And all of them are in one module, as all errors are."""
    found = [
        node.name
        for path in package.rglob("*.py")
        if path.name != "errors.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Warning")
    ]
    assert found == []
    warnings = {name for name in vars(errors) if name.endswith("Warning")}
    assert len(warnings) >= 7
    assert all(issubclass(getattr(errors, name), errors.UcudnnWarning) for name in warnings)
    assert issubclass(errors.UcudnnWarning, UserWarning)


def test_a_warning_from_within_a_model_shows_the_line_that_called_it() -> None:
    import torch

    from ucudnn import nn

    layer = nn.Conv1d(3, 4, 3, config=ucudnn.Config(unplanned="torch"))
    with pytest.warns(errors.UnplannedWarning) as caught:
        torch.nn.Sequential(layer)(torch.ones(2, 3, 9))
    assert Path(caught[0].filename) == Path(__file__)
