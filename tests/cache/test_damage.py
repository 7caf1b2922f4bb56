"""Damage: a bad file is named, and set aside if it is a cache's; no number is wrong."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import h5py
import laws
import pytest
from laws import texts

from ucudnn import cache as caches
from ucudnn.cache import CacheWarning
from ucudnn.cache.hdf5.codec import ENVELOPE_BYTES, wrap
from ucudnn.measurement import Measurement

SAMPLES = laws.samples_of_one_device()
OLD, NEW = SAMPLES[:12], SAMPLES[12:]


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """A segment with NEW, beside a compacted file with OLD."""
    with caches.open(tmp_path) as cache:
        cache.put(OLD)
    caches.open(tmp_path).put(NEW)
    (path,) = tmp_path.glob("*.d/*.h5")
    return path


def root_of(segment: Path) -> Path:
    return segment.parents[1]


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def swap_with(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def write_foreign(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["measurements"] = [1, 2, 3]


DAMAGES = {
    "bit in the envelope": lambda path: flip(path, 14),
    "bit in the data": lambda path: flip(path, ENVELOPE_BYTES + 700),
    "bit in the last byte": lambda path: flip(path, -1),
    "empty": lambda path: os.truncate(path, 0),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "all zero": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "foreign HDF5": swap_with(write_foreign),
    "sound envelope, no HDF5": swap_with(lambda path: path.write_bytes(wrap(b"not HDF5"))),
    "folder": swap_with(Path.mkdir),
    "symlink loop": swap_with(lambda path: path.symlink_to(path.name)),
    "pipe": swap_with(os.mkfifo),
}


# What nobody can tell from something that is not a cache's: a segment's name says that it is.
ANYBODYS = {
    "segment": ("folder", "symlink loop", "pipe"),
    "compacted": ("empty", "all zero", "foreign HDF5", "folder", "symlink loop", "pipe"),
}
CASES = [(victim, damage) for victim in ANYBODYS for damage in DAMAGES]


def damaged(segment: Path, victim: str, damage: str) -> tuple[Path, list[Measurement]]:
    """Damage a file; its path, and the measurements of the other one."""
    path, safe = (segment, OLD) if victim == "segment" else (root_of(segment) / "cpu-one.h5", NEW)
    DAMAGES[damage](path)
    return path, safe


@pytest.mark.parametrize(
    ("victim", "damage"), [case for case in CASES if case[1] not in ANYBODYS[case[0]]]
)
def test_damage_is_named_once_and_costs_that_file_alone(victim, damage, segment):
    root = root_of(segment)
    path, safe = damaged(segment, victim, damage)
    with caches.open(root, "r") as cache:
        with pytest.warns(CacheWarning) as caught:
            assert texts(cache) == texts(safe)
        cache.refresh()
        assert not cache.check().clean
    assert len(caught) == 1
    assert "left where it is" in str(caught[0].message)
    with caches.open(root) as cache:
        with pytest.warns(CacheWarning) as caught:
            assert texts(cache) == texts(safe)
        assert len(caught) == 1
        message = str(caught[0].message)
        assert str(path) in message
        (aside,) = path.parent.glob(f"{path.name}.damaged-*")
        assert aside.name in message
        cache.put(SAMPLES)
        assert texts(cache) == texts(SAMPLES)
        assert cache.check().clean
    with caches.open(root) as cache:
        assert texts(cache) == texts(SAMPLES)


def identity(path: Path) -> tuple[int, ...]:
    """Something that changes when a file is replaced, moved or written."""
    found = path.lstat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns


@pytest.mark.parametrize(
    ("victim", "damage"), [case for case in CASES if case[1] in ANYBODYS[case[0]]]
)
def test_what_may_be_anybodys_is_named_and_left(victim, damage, segment):
    root = root_of(segment)
    path, safe = damaged(segment, victim, damage)
    before = identity(path)
    with caches.open(root) as cache:
        with pytest.warns(CacheWarning, match="left as it is") as caught:
            assert texts(cache) == texts(safe)
        assert len(caught) == 1
        assert str(path) in str(caught[0].message)
        cache.put(SAMPLES)
        report = cache.check()
        assert [str(path) in problem for problem in report.problems] == [True]
        cache.prune({"protocol": 99})
    assert identity(path) == before
    assert not list(root.rglob("*.damaged-*"))
    with pytest.warns(CacheWarning, match="left as it is"), caches.open(root) as cache:
        assert texts(cache) == texts(SAMPLES)


def test_a_users_own_files_in_the_folder_are_named_and_left(segment):
    root = root_of(segment)
    own = [root / "train.h5", segment.parent / "data.h5", segment.parent / ".new-idea"]
    for path in own:
        write_foreign(path)
        os.utime(path, (1, 1))
    (root / "notes.damaged-by-water").write_text("mine")
    before = [(identity(path), path.read_bytes()) for path in own]
    names = sorted(root.iterdir())  # the lock is one of them
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with caches.open(root) as cache:
            assert texts(cache) == texts(SAMPLES)
            cache.put(OLD)
            cache.merge(root)
            report = cache.check()
            cache.prune({"status": "failed"})
    said = [str(one.message) for one in caught]
    for path in own[:2]:
        assert any(str(path) in sentence for sentence in said)
    assert [str(own[1]) in problem for problem in report.problems] == [True]
    assert [(identity(path), path.read_bytes()) for path in own] == before
    assert sorted(root.iterdir()) == names


def test_a_file_that_took_the_place_of_ours_is_not_moved(segment):
    """Another process may have read X.h5 before somebody replaced it."""
    root = root_of(segment)
    with caches.open(root) as cache:
        assert len(cache) == len(SAMPLES)
        swap_with(write_foreign)(root / "cpu-one.h5")
        foreign = (root / "cpu-one.h5").read_bytes()
        cache.put(OLD)
        with pytest.warns(CacheWarning, match="left as it is"):
            cache.close()
    assert (root / "cpu-one.h5").read_bytes() == foreign


def test_a_file_replaced_by_a_sound_one_in_the_meantime_is_used(segment, monkeypatch):
    sound = segment.read_bytes()
    flip(segment, -1)
    rename = os.rename

    def replaced(source: Path, target: Path) -> None:
        if Path(source) == segment:
            segment.write_bytes(sound)
        rename(source, target)

    monkeypatch.setattr(os, "rename", replaced)
    with caches.open(root_of(segment)) as cache:
        assert texts(cache) == texts(SAMPLES)
        assert cache.check().clean
