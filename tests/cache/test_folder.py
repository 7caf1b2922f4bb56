"""The folder of a cache: where it is, who may write it, what a put, a crash and a race leave."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import laws
import pytest
from laws import texts

from ucudnn import cache as caches
from ucudnn.cache import CacheWarning, Entry, store
from ucudnn.cache.entries import LATEST_NS
from ucudnn.errors import CacheError, ConfigError
from ucudnn.measurement import Device, Measurement

MEASUREMENTS = laws.samples_of_one_device()
# By which a child finds `laws`, too.
PATH = {"PYTHONPATH": os.pathsep.join(sys.path)}


def test_the_folder_is_the_argument_then_the_variable_then_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("UCUDNN_CACHE", str(tmp_path / "variable"))
    assert caches.default_path(tmp_path / "argument") == tmp_path / "argument"
    assert caches.default_path() == tmp_path / "variable"
    monkeypatch.delenv("UCUDNN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert caches.default_path() == tmp_path / "home" / "ucudnn"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert caches.default_path("~/mine") == tmp_path / "mine"
    with caches.open() as cache:
        cache.put(MEASUREMENTS)
    assert (tmp_path / "home" / "ucudnn" / "cpu-one.h5.d").is_dir()


def test_another_mode_is_refused():
    with pytest.raises(ConfigError, match="mode must be one of a, r, got 'w'"):
        caches.open(mode="w")


def test_opening_and_asking_writes_nothing(tmp_path):
    for mode in ("a", "r"):
        with caches.open(tmp_path / "cache", mode) as cache:
            assert cache.get(MEASUREMENTS[0].key) is None
            assert cache.check().clean
    assert not list(tmp_path.iterdir())


def test_a_cache_opened_for_reading_is_not_written(tmp_path):
    with caches.open(tmp_path, "r") as cache:
        for change in (
            lambda: cache.put(MEASUREMENTS),
            lambda: cache.prune({}),
            lambda: cache.merge(tmp_path),
        ):
            with pytest.raises(CacheError, match="opened for reading; open it with mode='a'"):
                change()


def test_a_put_is_one_file_synced_once_and_is_there_at_once(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def counting(handle: int) -> None:
        synced.append(stat.S_ISREG(os.fstat(handle).st_mode))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", counting)
    cache = caches.open(tmp_path)
    cache.put(MEASUREMENTS[:10])
    assert synced.count(True) == 1
    assert len(list(tmp_path.rglob("*.h5"))) == 1
    cache.put(MEASUREMENTS[10:])
    assert synced.count(True) == 2
    assert len(list(tmp_path.rglob("*.h5"))) == 2
    with caches.open(tmp_path, "r") as other:
        assert texts(other) == texts(MEASUREMENTS)


def test_a_number_that_cannot_be_stored_keeps_the_whole_put_out(tmp_path):
    too_large = Measurement(MEASUREMENTS[0].key, "ok", 2**63)
    with caches.open(tmp_path) as cache:
        with pytest.raises(CacheError, match="below 2\\^63"):
            cache.put([*MEASUREMENTS, too_large])
        assert len(cache) == 0
    assert not list(tmp_path.rglob("*.h5"))


def test_closing_leaves_one_file_and_reading_goes_on(tmp_path):
    cache = caches.open(tmp_path)
    for one in MEASUREMENTS:
        cache.put([one])
    cache.close()
    cache.close()
    assert len(list(tmp_path.rglob("*.h5"))) == 1
    assert texts(cache) == texts(MEASUREMENTS)
    cache.put([replace(MEASUREMENTS[0], notes=("again",))])
    assert cache.get(MEASUREMENTS[0].key).notes == ("again",)


def test_a_segment_that_was_copied_alone_can_be_used_and_pruned(tmp_path):
    with caches.open(tmp_path / "there") as cache:
        cache.put(MEASUREMENTS)
    (segment,) = tmp_path.rglob("*.h5")
    here = tmp_path / "here" / "cpu-one.h5.d"
    here.mkdir(parents=True)
    shutil.copy(segment, here / "copy.h5")
    with caches.open(tmp_path / "here") as cache:
        assert texts(cache) == texts(MEASUREMENTS)
        assert cache.prune({}) == len(MEASUREMENTS)
    assert not list(here.rglob("*.h5"))


def test_a_writer_merges_files_as_it_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_MANY_SEGMENTS", 4)
    cache = caches.open(tmp_path)
    for one in MEASUREMENTS:
        cache.put([one])
        assert len(list(tmp_path.rglob("*.h5"))) <= 4
    with caches.open(tmp_path, "r") as other:
        assert texts(other) == texts(MEASUREMENTS)


def test_each_kind_of_device_has_its_files(tmp_path):
    key = MEASUREMENTS[0].key
    devices = [
        Device("cuda", "NVIDIA H200", compute_capability="9.0", power_limit_w=700),
        Device("cuda", "NVIDIA H200", compute_capability="9.0", power_limit_w=350),
        Device("cpu", "../../Prozessor µ ünd / 2", "AVX2"),
        Device("cpu", ""),
    ]
    put = [Measurement(replace(key, device=one), "ok", 1 + n) for n, one in enumerate(devices)]
    with caches.open(tmp_path) as cache:
        cache.put(put)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"cuda-nvidia-h200-9.0.h5.d", "cpu-..-..-prozessor-nd-2.h5.d", "cpu.h5.d"}
    with caches.open(tmp_path) as cache:
        assert [cache.get(one.key) for one in put] == put
        found = [one.device for one in cache.info().devices]
        assert found == [devices[3], devices[2], devices[1], devices[0]]


def test_a_place_that_cannot_be_written_costs_one_warning(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with (
        warnings.catch_warnings(record=True) as caught,
        caches.open(tmp_path / "file" / "c") as cache,
    ):
        warnings.simplefilter("always")
        for one in MEASUREMENTS:
            cache.put([one])
            assert texts([cache.get(one.key)]) == texts([one])
        assert len(cache) == len(MEASUREMENTS)
    (said,) = caught
    assert issubclass(said.category, CacheWarning)
    assert "cannot be written" in str(said.message)
    assert "kept in memory" in str(said.message)


def test_what_waited_is_written_when_the_disk_takes_it_again(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with caches.open(tmp_path) as cache:
        cache.put(MEASUREMENTS[:5])
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            with pytest.warns(CacheWarning, match="No space left on device"):
                cache.put(MEASUREMENTS[5:10])
            cache.put(MEASUREMENTS[10:15])
        assert len(list(tmp_path.rglob("*.h5"))) == 1
        assert not list(tmp_path.rglob(".new-*"))
        cache.put(MEASUREMENTS[15:])
        with caches.open(tmp_path, "r") as other:
            assert texts(other) == texts(MEASUREMENTS)


def test_a_child_sees_what_its_parent_put_and_the_other_way_round(python, tmp_path):
    program = """
import os, sys, ucudnn.cache
from laws import sample_measurements
measurements = sample_measurements(30)
with ucudnn.cache.open(sys.argv[1]) as cache:
    cache.put(measurements[:10])
    child = os.fork()
    if child == 0:
        with ucudnn.cache.open(sys.argv[1]) as other:
            other.put(measurements[10:20])
        assert cache.get(measurements[15].key) is not None
        cache.put(measurements[20:])
        assert len(cache) == 30
        cache.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.get(measurements[5].key) is not None
    cache.refresh()
    assert len(cache) == 30
    assert cache.check().clean
"""
    python("-c", program, tmp_path, **PATH)


def interrupted(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, then: Callable[[], None]
) -> list[bool]:
    """Let another process do something just before a function of ours first returns.

    Returns whether that happened, as a list that is empty until then.
    """
    original, done = getattr(module, name), []

    def wrapper(*arguments: Any) -> Any:
        result = original(*arguments)
        if not done:
            done.append(True)
            then()
        return result

    monkeypatch.setattr(module, name, wrapper)
    return done


@pytest.mark.parametrize(
    ("module", "name"), [(store, "names_in"), (store, "segments_in"), (store, "read")]
)
def test_a_reader_misses_nothing_while_another_merges(module, name, tmp_path, monkeypatch):
    with caches.open(tmp_path) as first:
        first.put(MEASUREMENTS[:5])
    other = caches.open(tmp_path)
    other.put(MEASUREMENTS[5:12])
    other.put(MEASUREMENTS[12:])
    done = interrupted(monkeypatch, module, name, other.close)
    with caches.open(tmp_path, "r") as cache:
        assert texts(cache) == texts(MEASUREMENTS)
    assert done


def test_two_caches_of_one_process_can_be_written_at_the_same_time(tmp_path, monkeypatch):
    create, other = h5py.File.create_dataset, caches.open(tmp_path / "b")

    def meanwhile(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(h5py.File, "create_dataset", create)
        other.put(MEASUREMENTS[:5])  # as another thread does
        return create(*arguments, **named)

    monkeypatch.setattr(h5py.File, "create_dataset", meanwhile)
    with caches.open(tmp_path / "a") as cache:
        cache.put(MEASUREMENTS[5:])
        assert texts(cache) == texts(MEASUREMENTS[5:])
    with other:
        assert texts(other) == texts(MEASUREMENTS[:5])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (store, "segments_in"),
        (store, "encode"),
        (store, "publish"),
        (os, "replace"),
        (os, "unlink"),
    ],
)
def test_two_that_merge_at_once_lose_nothing(module, name, tmp_path, monkeypatch):
    monkeypatch.setattr(store.FileLock, "acquire", laws.refuse)
    with caches.open(tmp_path) as first:
        first.put(MEASUREMENTS[:5])
    other = caches.open(tmp_path)
    other.put(MEASUREMENTS[5:12])
    mine = caches.open(tmp_path)
    mine.put(MEASUREMENTS[12:])

    def intrude() -> None:
        other.put([replace(MEASUREMENTS[0], notes=("newer",))])
        other.close()

    done = interrupted(monkeypatch, module, name, intrude)
    mine.close()
    assert done
    with caches.open(tmp_path) as cache:
        wanted = [replace(MEASUREMENTS[0], notes=("newer",)), *MEASUREMENTS[1:]]
        assert texts(cache) == texts(wanted)
        assert cache.check().clean
    mine.refresh()
    other.refresh()
    assert texts(mine) == texts(other) == texts(wanted)


def test_nobody_waits_for_a_lock_but_pruning_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_LOCK_WAIT_S", 0.05)
    with caches.open(tmp_path) as cache:
        cache.put(MEASUREMENTS)
    with store.FileLock(tmp_path / "cpu-one.h5.d" / "lock"), caches.open(tmp_path) as cache:
        cache.put([replace(MEASUREMENTS[0], notes=("newer",))])
        with pytest.raises(CacheError, match="another process is merging"):
            cache.prune({})
    assert len(list(tmp_path.rglob("*.h5"))) == 2
    with caches.open(tmp_path) as cache:
        assert cache.get(MEASUREMENTS[0].key).notes == ("newer",)


def test_a_clock_far_ahead_hides_nothing_and_stops_nobody(tmp_path):
    with caches.open(tmp_path) as cache:
        cache.put_entries([Entry(MEASUREMENTS[0], LATEST_NS - 1)])
    newer = [replace(one, notes=("newer",)) for one in MEASUREMENTS]
    with caches.open(tmp_path) as cache:
        cache.put(newer)
        cache.put(newer[1:])
    with caches.open(tmp_path) as cache:
        assert texts(cache) == texts(newer)
        assert cache.check().clean


def test_what_another_process_pruned_does_not_come_back(tmp_path):
    with caches.open(tmp_path) as first:
        first.put(MEASUREMENTS[:10])
    cache = caches.open(tmp_path)
    assert len(cache) == 10
    cache.put(MEASUREMENTS[10:12])
    with caches.open(tmp_path) as other:
        assert other.prune({}) == 12
    cache.put(MEASUREMENTS[12:])
    cache.close()
    assert texts(cache) == texts(MEASUREMENTS[12:])
    with caches.open(tmp_path, "r") as cache:
        assert texts(cache) == texts(MEASUREMENTS[12:])


def refusing(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, where: Callable[[Any], bool]
) -> None:
    """Let a function fail for some paths, as for a user without permission."""
    original = getattr(module, name)

    def wrapper(path: Any, *arguments: Any, **named: Any) -> Any:
        if where(Path(os.fspath(path))):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *arguments, **named)

    monkeypatch.setattr(module, name, wrapper)


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    cache = caches.open(tmp_path)
    cache.put(MEASUREMENTS)
    refusing(monkeypatch, os, "listdir", lambda path: path == tmp_path)
    with pytest.raises(CacheError, match="cannot read the cache .*: Permission denied"):
        len(cache)
    with pytest.raises(CacheError, match="cannot read the cache .*; let this user read it"):
        cache.check()


def test_a_file_that_cannot_be_read_is_named_and_the_rest_is_used(tmp_path, monkeypatch):
    caches.open(tmp_path).put(MEASUREMENTS[:5])
    (first,) = tmp_path.rglob("*.h5")
    caches.open(tmp_path).put(MEASUREMENTS[5:])
    refusing(monkeypatch, Path, "read_bytes", lambda path: path == first)
    with (
        pytest.warns(CacheWarning, match=rf"{first.name} cannot be read \(Permission denied\)"),
        caches.open(tmp_path, "r") as cache,
    ):
        assert texts(cache) == texts(MEASUREMENTS[5:])


def test_pruning_a_disk_that_takes_nothing_removes_nothing(tmp_path, monkeypatch):
    with caches.open(tmp_path) as cache:
        cache.put(MEASUREMENTS)
    with caches.open(tmp_path) as cache:
        with monkeypatch.context() as patch:
            refusing(patch, os, "replace", lambda _: True)
            with pytest.raises(CacheError, match="cannot write .* denied; nothing was removed"):
                cache.prune({"status": "ok"})
        assert texts(cache) == texts(MEASUREMENTS)
    with caches.open(tmp_path, "r") as cache:
        assert texts(cache) == texts(MEASUREMENTS)


def test_a_child_leaves_it_to_its_parent_to_write_what_waits(python, tmp_path):
    program = """
import os, sys, pathlib, warnings, ucudnn.cache
from laws import sample_measurements
warnings.simplefilter("ignore")
place = pathlib.Path(sys.argv[1])
place.write_text("in the way")
with ucudnn.cache.open(place) as cache:
    cache.put(sample_measurements(10))
    place.unlink()
    child = os.fork()
    if child == 0:
        assert len(cache) == 10
        cache.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not place.exists()
with ucudnn.cache.open(place, "r") as cache:
    assert len(cache) == 10
"""
    python("-c", program, tmp_path / "cache", **PATH)
