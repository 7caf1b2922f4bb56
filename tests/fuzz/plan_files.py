"""Mutations of a plan's file: of its bytes, and of its values with the checksum repaired."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from by_hand import signed
from rich.console import Console

from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.measurement import Conditions, Device, Software
from ucudnn.outcomes import LayoutRace, StepRace, Way
from ucudnn.plan import KernelPlan, Plan, Timing
from ucudnn.problem import Problem
from ucudnn.reports.comparison import compare
from ucudnn.reports.text import (
    cards_table,
    comparison_document,
    comparison_summary,
    comparison_table,
    kernel_table,
    layout_table,
    plan_verdict,
)
from ucudnn.reports.text import plan_table as table_of

PIECES = (
    *(b"1e999", b"NaN", b"-1", b"[[[[", b'"\\ud800"', b"9" * 30, b"9" * 5000, b"null", b"\x00"),
    *(b"\xef\xbb\xbf", b" ", b"\n", b"\xff", b"true", b"1.0", b'"', b"{}", b"}"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, -2, 2, 3, 5, 10**6, 2**31, 2**62, 2**63, 10**30, 10**4000),
    *(0.0, 1.0, 2.0, -1.0, 1.5, float("inf"), float("nan"), "", "x", "torch_default", "fft"),
    *("im2col_gemm", "onednn", "nhwc", "wgrad", "tf32", "float16", "µ\ud800\x00", "../../x"),
    *(
        "9" * 400,
        "64MiB",
        "channels_last",
        "keep",
        [],
        [[]],
        [1],
        [[1, 0]],
        [0, 0],
        ["a"],
        {},
        {"a": 1},
        [3, 3],
    ),
    *([[1, 1], [1, 1]], [[2, 0], [5, 1]], "cudnn", "recorded", "[" * 9),
)


def sample_plan() -> Plan:
    """A plan with every kind of split, of four kernels in two ranks."""
    timing = Timing(time_ns=900, spread_ns=9, workspace_bytes=4096, samples=7)
    flat = Problem("fprop", 5, 4, 4, (9, 9), (3, 3), padding=((1, 1), (1, 1)))
    deep = Problem("dgrad", 2, 4, 6, (6, 5, 4), (3, 3, 3), stride=(2, 1, 1), groups=2)
    names = ("torch_default", "onednn", "im2col_gemm")
    by_batch = KernelPlan(
        problem=flat,
        layers=("stem", "body.0"),
        algorithms=names,
        alone=(1, 0, -1, -2, -1),
        last=((1, 2), (2, 1), (1, 2), (2, 1), (1, 2)),
        predicted_time_ns=800,
        timing=timing,
        default=timing,
        notes=("default kernel=onednn",),
        slabs=((4, 1), (5, 2)),
    )
    by_slabs = KernelPlan(
        *(deep, ("head",), names, (-2, -2), ((0, -1), (0, -1)), 7, timing, None, ()),
        slabs=((2, 0), (4, 2)),
    )
    alone = KernelPlan(
        *(flat.with_batch(2), ("tail",), names[:1], (0, 0), ((0, -1), (0, -1)), 7, timing, timing)
    )
    device = Device("cpu", "Example CPU", isa="AVX2", cores=2)
    last = {"memory_format": "channels_last", "ratio": 0.8, "rounds": 5}
    ways = Way("torch", "torch", time_ns=110, rounds=5), Way("plan", "plan", time_ns=90, **last)
    return Plan(
        (by_batch, by_slabs, alone),
        device,
        Software("2.13.0"),
        Conditions(threads=2),
        Config(),
        step_race=StepRace(110, 90, 0.8, 0.79, 0.81, 5, dropped=("stem",)),
        memory_format="channels_last",
        layout_race=LayoutRace(ways, winner=1),
    )


def mutated_bytes(content: bytes, chance: random.Random) -> bytes:
    """A file with some bytes changed, dropped, doubled or put in."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        place = chance.randrange(len(changed) or 1)
        match chance.randrange(5):
            case 0:
                changed[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del changed[place : place + chance.choice((1, 2, 50))]
            case 2:
                del changed[place:]
            case 3:
                other = chance.randrange(len(changed) or 1)
                changed[place:place] = changed[other : other + chance.randrange(200)]
            case _:
                changed[place : place + chance.randrange(2)] = chance.choice(PIECES)
    return bytes(changed)


def mutated_document(document: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A document with some values replaced, exchanged, dropped or added, to be signed."""
    changed = copy.deepcopy(document)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        parent, name = chance.choice(list(_places(changed)))
        value = chance.choice(VALUES)
        match chance.randrange(6):
            case 0:
                del parent[name]
            case 1:
                other, its_name = chance.choice(list(_places(changed)))
                parent[name] = copy.deepcopy(other[its_name])
            case 2 if isinstance(parent, list):
                parent.insert(name, copy.deepcopy(value))
            case 2:
                parent[f"extra_{chance.randrange(3)}"] = copy.deepcopy(value)
            case _:
                parent[name] = copy.deepcopy(value)
    return changed


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) of a document."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


class Trials:
    """Loads a mutated plan and uses whatever can be loaded, in all ways that need no framework."""

    def __init__(self, folder: Path) -> None:
        self._path, self._again = folder / "a.plan.json", folder / "again.plan.json"
        self._plan = sample_plan()
        self._plan.save(self._path)
        self._content = self._path.read_bytes()
        self._document = json.loads(self._content)

    def __call__(self, chance: random.Random) -> tuple[str, str]:
        if chance.random() < 0.5:
            self._path.write_bytes(mutated_bytes(self._content, chance))
            return self._load_bytes()
        signed(mutated_document(self._document, chance), self._path)
        try:
            plan = Plan.load(self._path)
        except PlanError as error:
            return "values refused", str(error)
        self._use(plan)
        return "values loaded", ""

    def _load_bytes(self) -> tuple[str, str]:
        try:
            plan = Plan.load(self._path)
        except PlanError as error:
            return "bytes refused", str(error)
        assert plan == self._plan  # such as another space between two values
        return "bytes harmless", ""

    def _use(self, plan: Plan) -> None:
        for kernel in plan.kernels:
            for batch in range(1, kernel.problem.batch + 1):
                if kernel.covers(batch):
                    assert kernel.split(batch).size
            self._print(kernel_table(kernel))
        assert plan.workspace_bytes >= 0
        assert plan.predicted_time_ns >= 0
        plan.save(self._again)
        again = Plan.load(self._again)
        assert (again.kernels, again.hash) == (plan.kernels, plan.hash)
        found = compare(self._plan, plan)
        json.dumps(comparison_document(found))
        for value in (table_of(plan), cards_table(plan), *plan_verdict(plan)):
            self._print(value)
        if plan.layout_race is not None:
            self._print(layout_table(plan.layout_race))
        names = ("one", "other")
        for value in (comparison_table(found, names), comparison_summary(found, names)):
            self._print(value)

    @staticmethod
    def _print(value: object) -> None:
        Console(file=StringIO(), width=130).print(value)
