"""Facts beside a measurement's numbers: they come back from every file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest

from ucudnn import cache as caches
from ucudnn.cache.exchange import read_entries, write_entries
from ucudnn.cache.hdf5.codec import ENVELOPE_BYTES, wrap
from ucudnn.errors import UcudnnError
from ucudnn.measurement import (
    Conditions,
    Device,
    FailureKind,
    Measurement,
    MeasurementKey,
    Software,
    Subject,
)
from ucudnn.problem import Problem
from ucudnn.split import Split, Step

KEY = MeasurementKey(
    Problem("fprop", 4, 3, 5, (12, 12), (3, 3)),
    "gemm",
    Device("cpu", "Some Processor"),
    Software("2.13.0"),
    Conditions(threads=2),
    1,
)
VALUES = {
    "failure": FailureKind.HANG,
    "lost_to": "onednn, the “fast” one",
    "implementation": "slow_conv2d",
    "is_deterministic": False,
    "adds_bias": True,
    "load": 1.5,
}
# One measurement for each fact, one with all and one with none.
MEASUREMENTS = [
    Measurement(replace(KEY, algorithm=f"algorithm {place}"), "failed", reason="why", **facts)
    for place, facts in enumerate([{}, VALUES, *({name: VALUES[name]} for name in VALUES)])
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with caches.open(tmp_path) as cache:
        cache.put(MEASUREMENTS)
    (path,) = tmp_path.rglob("*.h5")
    return path


def edit(path: Path, change: Callable[[h5py.File], None]) -> None:
    """Change the HDF5 part of a file, and seal it again."""
    image = path.with_suffix(".image")
    image.write_bytes(path.read_bytes()[ENVELOPE_BYTES:])
    with h5py.File(image, "r+") as opened:
        change(opened)
    path.write_bytes(wrap(image.read_bytes()))
    image.unlink()


def test_words_that_are_none_are_refused() -> None:
    with pytest.raises(UcudnnError, match="must be one of"):
        replace(MEASUREMENTS[0], failure="boredom")
    with pytest.raises(UcudnnError, match="must be one of"):
        replace(KEY, subject="weather")


SPLIT = Split("batch", (Step(3, "gemm"), Step(1, "“gemm”")))
OTHER_SUBJECTS = [
    replace(KEY, subject=Subject.FIRST_RUN),
    *(
        replace(KEY, algorithm="", subject=Subject.CALL, split=split, race=race)
        for split in (SPLIT, replace(SPLIT, axis="spatial"))
        for race in ("one", "another")
    ),
    *(
        replace(KEY, algorithm="", subject=subject)
        for subject in (Subject.OPERATIONS, Subject.TRAFFIC, Subject.OVERHEAD)
    ),
]


def test_subjects_are_keys_of_their_own(tmp_path: Path) -> None:
    """Whatever was timed of one problem, each has its time, in a cache and in text."""
    timed = [Measurement(key, "ok", 5 + place) for place, key in enumerate([KEY, *OTHER_SUBJECTS])]
    with caches.open(tmp_path) as cache:
        cache.put(timed)
    with caches.open(tmp_path, "r") as cache:
        assert [cache.get(one.key) for one in timed] == timed
        assert sorted(map(repr, cache)) == sorted(map(repr, timed))
        found = cache.explain(replace(OTHER_SUBJECTS[1], race="a third"))
        assert [one.field for one in found.differences] == ["race"]
    for suffix in (".csv", ".json"):
        write_entries(tmp_path / f"all{suffix}", [caches.Entry(one, 1) for one in timed])
        assert [one.measurement for one in read_entries(tmp_path / f"all{suffix}")] == timed


@pytest.mark.parametrize(
    "changes",
    [
        {"subject": Subject.CALL},
        {"subject": Subject.CALL, "algorithm": ""},
        {"split": SPLIT},
        {"subject": Subject.OPERATIONS},
    ],
)
def test_a_subject_needs_what_it_is_of(changes: dict[str, Any]) -> None:
    with pytest.raises(UcudnnError, match="do not go with"):
        replace(KEY, **changes)


@pytest.mark.parametrize(
    "text",
    ['{"energy_uj": 4}', '{"failure": "boredom"}', '{"load": "high"}', "[]", "{", "lost_to"],
)
def test_facts_that_are_none_are_damage(file: Path, text: str) -> None:
    edit(file, lambda opened: opened["facts"].__setitem__(0, text))
    with caches.open(file.parent) as cache, pytest.warns(caches.CacheWarning):
        assert not list(cache)


def test_notes_of_today_are_left_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "timings.json"
    entry = caches.Entry(Measurement(KEY, "ok", 5, notes=("load=1.5", "nondeterministic")), 1)
    write_entries(path, [entry])
    assert read_entries(path) == [entry]
