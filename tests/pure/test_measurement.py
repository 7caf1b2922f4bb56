"""Measurement: frozen values whose status, time and role agree."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from ucudnn.errors import UcudnnError
from ucudnn.measurement import (
    Conditions,
    Device,
    Measurement,
    MeasurementKey,
    Role,
    Software,
    Subject,
)
from ucudnn.problem import Problem
from ucudnn.split import Chunk, Split

KEY = MeasurementKey(
    problem=Problem("fprop", 4, 6, 8, (9, 7), (3, 3)),
    algorithm="onednn",
    device=Device("cpu", "Example CPU", isa="AVX2", cores=2),
    software=Software("2.13.0", onednn="3.9"),
    conditions=Conditions(threads=2, allocator="glibc"),
    protocol=1,
)
OTHERS: dict[str, Any] = {
    "problem": KEY.problem.with_batch(5),
    "algorithm": "gemm",
    "device": replace(KEY.device, isa="AVX512"),
    "software": replace(KEY.software, onednn="3.10"),
    "conditions": replace(KEY.conditions, threads=1),
    "protocol": 2,
    "subject": Subject.FIRST_RUN,
    "race": "another",
}
CALL = replace(
    KEY, algorithm="", subject=Subject.CALL, split=Split("batch", (Chunk(4, "gemm"),)), race="one"
)


def test_the_key_is_hashable_and_every_field_counts() -> None:
    assert {*OTHERS, "split"} == {item.name for item in fields(MeasurementKey)}
    keys = {KEY, *(replace(KEY, **{name: value}) for name, value in OTHERS.items())}
    keys |= {CALL, replace(CALL, split=Split("batch", (Chunk(4, "onednn"),)))}
    assert len(keys) == 3 + len(OTHERS)
    assert pickle.loads(pickle.dumps(KEY)) == KEY


@pytest.mark.parametrize(
    ("status", "time_ns"), [("ok", 1000), ("screened", 9000), ("untimed", None), ("failed", None)]
)
def test_a_time_belongs_to_a_status_that_was_timed(status: str, time_ns: int | None) -> None:
    assert Measurement(KEY, status, time_ns=time_ns).status == status
    opposite = None if time_ns is not None else 1000
    with pytest.raises(UcudnnError, match=f"time_ns={opposite} does not go with status '{status}'"):
        Measurement(KEY, status, time_ns=opposite)


def test_refuses_an_unknown_status() -> None:
    with pytest.raises(UcudnnError, match="status must be one of ok, screened, untimed, failed"):
        Measurement(KEY, "slow", time_ns=1)


@pytest.mark.parametrize(
    "changes", [{"time_ns": -1}, {"spread_ns": -1}, {"samples": (5, -1)}, {"workspace_bytes": -1}]
)
def test_refuses_negative_numbers(changes: dict[str, Any]) -> None:
    with pytest.raises(UcudnnError, match="must not be negative"):
        Measurement(KEY, "ok", **{"time_ns": 1, **changes})


def test_a_role_is_equal_to_its_text_and_written_as_it() -> None:
    assert json.dumps(asdict(Conditions(Role.FIRST))["role"]) == '"first"'
    assert {Conditions("first"), Conditions(Role.FIRST)} == {Conditions("first")}


@pytest.mark.parametrize(
    ("device", "text"),
    [
        (Device("cpu", "Example CPU", isa="AVX2", cores=2), "Example CPU, AVX2, 2 cores"),
        (Device("cuda", "GPU", cores=132, compute_capability="9.0"), "GPU, 132 cores, 9.0"),
        (Device("cpu", "any"), "any"),
    ],
)
def test_a_device_prints_what_is_known_of_it(device: Device, text: str) -> None:
    assert str(device) == text
