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
from ucudnn.cache.segments import ENVELOPE_BYTES, VERSION, wrap

SAMPLES = laws.samples_of_one_device()
OLD, NEW = SAMPLES[:12], SAMPLES[12:]


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """A segment with NEW, beside one with OLD."""
    caches.open(tmp_path).put(OLD)
    (old,) = tmp_path.glob("*.d/*.h5")
    caches.open(tmp_path).put(NEW)
    (new,) = set(tmp_path.glob("*.d/*.h5")) - {old}
    return new


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


# What is no file may be anybody's.
ANYBODYS = ("folder", "symlink loop", "pipe")


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name not in ANYBODYS])
def test_damage_is_named_once_and_costs_that_file_alone(damage, segment):
    root = root_of(segment)
    DAMAGES[damage](segment)
    with caches.open(root, "r") as cache:
        with pytest.warns(CacheWarning) as caught:
            assert texts(cache) == texts(OLD)
        cache.refresh()
        assert not cache.check().clean
    assert len(caught) == 1
    assert "left where it is" in str(caught[0].message)
    with caches.open(root) as cache:
        with pytest.warns(CacheWarning) as caught:
            assert texts(cache) == texts(OLD)
        assert len(caught) == 1
        message = str(caught[0].message)
        assert str(segment) in message
        (aside,) = segment.parent.glob(f"{segment.name}.damaged-*")
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


@pytest.mark.parametrize("damage", ANYBODYS)
def test_what_may_be_anybodys_is_named_and_left(damage, segment):
    root = root_of(segment)
    DAMAGES[damage](segment)
    before = identity(segment)
    with caches.open(root) as cache:
        with pytest.warns(CacheWarning, match="left as it is") as caught:
            assert texts(cache) == texts(OLD)
        assert len(caught) == 1
        assert str(segment) in str(caught[0].message)
        cache.put(SAMPLES)
        report = cache.check()
        assert [str(segment) in problem for problem in report.problems] == [True]
        cache.prune({"protocol": 99})
    assert identity(segment) == before
    assert not list(root.rglob("*.damaged-*"))
    with pytest.warns(CacheWarning, match="left as it is"), caches.open(root) as cache:
        assert texts(cache) == texts(SAMPLES)


@pytest.mark.parametrize("mode", ["a", "r"])
def test_files_of_another_version_are_named_once_and_left(mode, segment):
    """Those of the version before, too, which had a file beside the folder of each device."""
    root = root_of(segment)
    others = [segment, segment.with_name("another.h5"), root / "cpu-one.h5"]
    for path in others:
        path.write_bytes(wrap(b"what another version needs", VERSION - 1))
    before = [(identity(path), path.read_bytes()) for path in others]
    with caches.open(root, mode) as cache:
        with pytest.warns(CacheWarning) as caught:
            assert texts(map(cache.get, (OLD[0].key, NEW[0].key))) == texts([OLD[0], None])
        if mode == "a":
            cache.put(NEW)
    beside, inside = (str(one.message) for one in caught)
    assert "cpu-one.h5 is not a file of this cache, or an earlier version" in beside
    assert f"format version {VERSION - 1}, this ucudnn reads {VERSION}" in inside
    assert "left as it is" in inside
    assert [(identity(path), path.read_bytes()) for path in others] == before
    with pytest.warns(CacheWarning), caches.open(root, "r") as cache:
        assert texts(cache) == texts(SAMPLES if mode == "a" else OLD)


def test_a_users_own_files_in_the_folder_are_named_and_left(segment):
    root = root_of(segment)
    own = [root / "train.h5", segment.parent / "data.h5", segment.parent / ".new-idea"]
    for path in own:
        write_foreign(path)
        os.utime(path, (1, 1))
    (root / "notes.damaged-by-water").write_text("mine")
    before = [(identity(path), path.read_bytes()) for path in own]
    names = sorted(root.iterdir())
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
