"""How steps of a compiled model were compiled: what is printed, kept and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.measurement import Conditions, Device, Software
from ucudnn.outcomes import Compilation
from ucudnn.plan import Plan

PLAN = Plan((), Device("cpu", "any"), Software("2.13"), Conditions(), Config())


def test_what_is_printed() -> None:
    assert str(Compilation(seconds=34)) == (
        "the steps that judged it were compiled by torch.compile, which took 34 s beside the time "
        "budget"
    )
    assert str(Compilation(2, relaid=5)).endswith(
        "; there 5 convolutions are in another layout than in the plan, which does not act on "
        "them: tune with layout='auto', or in the other layout"
    )
    assert str(Compilation(2, "torch.compile failed (no compiler)")) == (
        "the model is compiled, but the steps that judged its plan were not: torch.compile failed "
        "(no compiler)"
    )


def test_json_gives_it_back() -> None:
    compilation = Compilation(3, "why not", 2)
    values = json.loads(json.dumps(compilation.to_dict()))
    assert Compilation.from_dict(values) == compilation


@pytest.mark.parametrize("compilation", [Compilation(5), Compilation(reason="none")])
def test_it_changes_no_hash(compilation: Compilation) -> None:
    judged = replace(PLAN, compilation=compilation)
    assert judged.hash == PLAN.hash
    assert Plan.from_dict(judged.to_dict()).compilation == compilation


def test_plans_without_it_are_written_as_before() -> None:
    document = PLAN.to_dict()
    assert "compilation" not in document
    assert Plan.from_dict(document).compilation is None


@pytest.mark.parametrize(
    "values",
    [{"seconds": -1}, {"seconds": True}, {"seconds": 1.5}, {"relaid": -1}, {"reason": None}],
)
def test_what_cannot_be_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="(counts|reasons) of a compilation must be (ints|strings)"):
        Compilation(**values)
