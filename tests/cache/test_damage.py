"""Damage: a bad file is named, and set aside if it is a cache's; no number is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import h5py
import pytest

from ucudnn import cache as caches
from ucudnn import testing
from ucudnn.cache import CacheWarning
from ucudnn.cache.hdf5.envelope import ENVELOPE_BYTES, wrap
from ucudnn.cache.hdf5.recovery import salvage
from ucudnn.measurement import Device, Measurement

DEVICE = Device("cpu", "one")
SAMPLES = [
    replace(one, key=replace(one.key, device=DEVICE))
    for one in testing.sample_measurements(60, seed=9)[1::3]
]
OLD, NEW = SAMPLES[:12], SAMPLES[12:]


def texts(measurements: Iterable[Measurement]) -> list[str]:
    return sorted(map(repr, measurements))


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
def test_damage_is_named_once_and_costs_that_file_alone(
    victim: str, damage: str, segment: Path
) -> None:
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
        report = cache.check()
        assert report.clean
        assert any(aside.name in note for note in report.notes)
    with caches.open(root) as cache:
        assert texts(cache) == texts(SAMPLES)


def identity(path: Path) -> tuple[int, ...]:
    """Something that changes when a file is replaced, moved or written."""
    found = path.lstat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns


@pytest.mark.parametrize(
    ("victim", "damage"), [case for case in CASES if case[1] in ANYBODYS[case[0]]]
)
def test_what_may_be_anybodys_is_named_and_left(victim: str, damage: str, segment: Path) -> None:
    root = root_of(segment)
    path, safe = damaged(segment, victim, damage)
    before = identity(path)
    with caches.open(root) as cache:
        with pytest.warns(CacheWarning, match="left as it is") as caught:
            assert texts(cache) == texts(safe)
        assert len(caught) == 1
        assert str(path) in str(caught[0].message)
        cache.put(SAMPLES)
        report = cache.check(fix=True)
        assert not report.fixed
        assert [str(path) in problem for problem in report.problems] == [True]
        cache.prune({"protocol": 99})
    assert identity(path) == before
    assert not list(root.rglob("*.damaged-*"))
    with pytest.warns(CacheWarning, match="left as it is"), caches.open(root) as cache:
        assert texts(cache) == texts(SAMPLES)


def test_a_users_own_files_in_the_folder_are_named_and_left(segment: Path) -> None:
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
            report = cache.check(fix=True)
            cache.prune({"status": "failed"})
    assert not report.fixed
    said = [str(one.message) for one in caught]
    for path in own[:2]:
        assert any(str(path) in sentence for sentence in said)
        assert any(str(path) in sentence for sentence in (*report.notes, *report.problems))
    assert [(identity(path), path.read_bytes()) for path in own] == before
    assert sorted(root.iterdir()) == names


def test_a_file_that_took_the_place_of_ours_is_not_moved(segment: Path) -> None:
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


def test_something_in_place_of_the_folder_of_segments_is_left(tmp_path: Path) -> None:
    (tmp_path / "cpu-one.h5.d").symlink_to("cpu-one.h5.d")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with caches.open(tmp_path) as cache:
            cache.put(OLD)
            assert texts(cache) == texts(OLD)
            assert [f"{tmp_path}" in one for one in cache.check().problems] == [True]
    said = [str(one.message) for one in caught]
    assert "is not a folder: it was left as it is; move it elsewhere" in said[0]
    assert "are kept in memory" in said[1]
    assert len(said) == 2
    assert (tmp_path / "cpu-one.h5.d").is_symlink()


def test_what_was_read_before_the_damage_is_written_again(segment: Path) -> None:
    root = root_of(segment)
    with caches.open(root) as cache:
        assert len(cache) == len(SAMPLES)
        flip(root / "cpu-one.h5", -1)
        cache.put([replace(OLD[0], notes=("again",))])
    with caches.open(root) as cache:
        assert texts(cache) == texts([replace(OLD[0], notes=("again",)), *OLD[1:], *NEW])


def test_a_file_replaced_by_a_sound_one_in_the_meantime_is_used(
    segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_fixing_recovers_every_entry_that_is_still_itself(segment: Path) -> None:
    root = root_of(segment)
    with h5py.File(segment) as file:  # the bytes of one entry's time, in contiguous storage
        table = file["measurements"]
        field = table.dtype.fields["time_ns"][1]
        place = table.id.get_offset() + 3 * table.dtype.itemsize + field
        hit = int(table[3]["stored_ns"])
    flip(segment, place)
    with caches.open(root) as cache:
        with pytest.warns(CacheWarning, match="cache check --fix"):
            assert texts(cache) == texts(OLD)
        report = cache.check(fix=True)
        assert any("7 sound entries were recovered" in fixed for fixed in report.fixed)
        assert report.clean
        lost = set(texts(SAMPLES)) - set(texts(cache))
        assert len(lost) == 1
        assert hit not in {entry.stored_ns for entry in cache.entries()}
        assert len(list(root.rglob("*.salvaged-*"))) == 1
        assert not cache.check(fix=True).fixed


def test_fixing_recovers_everything_from_a_file_whose_envelope_alone_is_bad(segment: Path) -> None:
    flip(segment, 40)
    with caches.open(root_of(segment)) as cache:
        report = cache.check(fix=True)
        assert any("was kept as" in fixed for fixed in report.fixed)
        assert any("8 sound entries" in fixed for fixed in report.fixed)
        assert texts(cache) == texts(SAMPLES)


def test_a_file_without_a_folder_of_segments_is_recovered_too(tmp_path: Path) -> None:
    with caches.open(tmp_path) as cache:
        cache.put(OLD)
    (tmp_path / "cpu-one.h5.d").rmdir()
    flip(tmp_path / "cpu-one.h5", 40)
    with pytest.warns(CacheWarning), caches.open(tmp_path) as cache:
        assert len(cache) == 0
    with caches.open(tmp_path) as cache:
        assert any("set aside" in note for note in cache.check().notes)
        assert cache.check(fix=True).fixed
        assert texts(cache) == texts(OLD)


@pytest.mark.slow
def test_no_flipped_byte_brings_back_a_wrong_number(tmp_path: Path) -> None:
    """Every 199th byte in turn, in one child process as salvaging runs it."""
    with caches.open(tmp_path) as cache:
        cache.put(OLD)
    program = """
import sys
from pathlib import Path
from ucudnn.cache.hdf5 import recovery
whole, target = Path(sys.argv[1]), Path(sys.argv[2])
data = whole.read_bytes()
for place in range(0, len(data), 199):
    bad = bytearray(data)
    bad[place] ^= 1 << place % 8
    source = target / "bad"
    source.write_bytes(bad)
    out = target / f"{place}.h5"
    if recovery.main(source, out):
        continue
"""
    file, out = tmp_path / "cpu-one.h5", tmp_path / "out"
    out.mkdir()
    subprocess.run([sys.executable, "-c", program, str(file), str(out)], check=True, timeout=100)
    recovered = sorted(out.glob("*.h5"))
    assert recovered
    for path in recovered:
        root = path.with_suffix("")
        (root / "cpu-one.h5.d").mkdir(parents=True)
        path.rename(root / "cpu-one.h5.d" / "1.h5")
        with caches.open(root, "r") as cache:
            assert set(map(repr, cache)) <= set(map(repr, OLD))


def test_salvaging_ends_when_its_time_is_up(segment: Path) -> None:
    assert salvage(segment, seconds=0.001) is None
    assert len(salvage(segment) or ()) == len(NEW)


def test_leftovers_of_killed_writers_are_noted_and_removed_when_old(segment: Path) -> None:
    young, old = (segment.parent / f".new-{name}" for name in ("7-0123abcd", "8-0123abcd"))
    for path in (young, old):
        path.write_bytes(b"half a fi")
    os.utime(old, (1, 1))
    with caches.open(root_of(segment)) as cache:
        report = cache.check()
        assert report.clean
        assert [str(old) in note for note in report.notes] == [True]
        assert any("removed" in fixed for fixed in cache.check(fix=True).fixed)
        assert young.exists()
        assert not old.exists()


def test_an_unreadable_file_is_named_and_left(
    segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.open

    def refusing(path: Path, *arguments: int) -> int:
        if path == segment:
            raise PermissionError(13, "Permission denied")
        return read(path, *arguments)

    monkeypatch.setattr(os, "open", refusing)
    with caches.open(root_of(segment)) as cache:
        with pytest.warns(CacheWarning, match="cannot be read \\(Permission denied\\)"):
            assert texts(cache) == texts(OLD)
        cache.put([replace(OLD[0], notes=("again",))])
    assert segment.exists()
