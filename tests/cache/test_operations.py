"""Counting, checking, merging, pruning and explaining a cache in a folder."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import laws
import pytest

from ucudnn import cache as caches
from ucudnn.errors import CacheError, ConfigError
from ucudnn.measurement import Measurement

MEASUREMENTS = laws.sample_measurements(40, seed=6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache with MEASUREMENTS."""
    with caches.open(tmp_path / "cache") as cache:
        cache.put(MEASUREMENTS)
    return tmp_path / "cache"


def test_a_folder_that_cannot_be_written_is_said_to_be_read_only(folder):
    file = folder.parent / "a file"
    file.write_text("")
    assert not caches.open(file / "cache", "r").info().writable


def test_merge_refuses_a_folder_without_a_cache(folder, tmp_path):
    with (
        caches.open(folder) as target,
        pytest.raises(CacheError, match="there is no cache in .*nowhere"),
    ):
        target.merge(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("loaded", "quiet", "may"),
    [
        ("ok", "ok", False),
        ("screened", "ok", False),
        ("ok", "untimed", True),
        ("failed", "ok", True),
        ("ok", "failed", True),
        ("failed", "failed", False),
    ],
)
def test_what_says_more_replaces_a_quiet_measurement(loaded, quiet, may):
    some = laws.sample_measurements(1, seed=6)[0]
    one, other = (
        Measurement(some.key, status, 9 if status in ("ok", "screened") else None, load=load)
        for status, load in ((loaded, 1.0), (quiet, 0.0))
    )
    assert one.may_replace(other) == may
    assert other.may_replace(one)


@pytest.mark.parametrize("is_here", [True, False], ids=["loaded here", "loaded there"])
@pytest.mark.parametrize("target", ["folder", "memory"])
def test_merge_prefers_what_was_taken_without_load(is_here, target, tmp_path):
    samples = laws.sample_measurements(60, seed=6)
    # NaN, which some have, is not equal to itself.
    measurements = [replace(one, load=0.0, error=0.5) for one in samples]
    timed = [one for one in measurements if one.status == "ok"]
    looked_at = [one for one in measurements if one.status == "untimed"]
    assert timed
    assert looked_at
    loaded = [replace(one, time_ns=7 * (one.time_ns or 0), load=1.0) for one in timed]
    # Of these the measurement under load says more.
    news = [replace(one, status="ok", time_ns=9, load=1.0) for one in looked_at]
    here = caches.open(tmp_path / "here") if target == "folder" else caches.MemoryCache()
    with here, caches.open(tmp_path / "there") as there:
        quiet_one, loaded_one = (there, here) if is_here else (here, there)
        quiet_one.put([*timed, *looked_at])
        loaded_one.put([*loaded, *news])
        there.close()
        here.merge(tmp_path / "there")
        assert [here.get(one.key) for one in timed] == timed
        assert [here.get(one.key) for one in looked_at] == news
        assert len(here) == len(timed) + len(looked_at)


def test_merge_passes_over_a_damaged_file_of_the_other(folder, tmp_path):
    victim = min(folder.rglob("*.h5"))
    os.truncate(victim, victim.stat().st_size // 2)
    data = victim.read_bytes()
    with caches.open(tmp_path / "target") as target:
        with pytest.warns(caches.CacheWarning, match="cannot be used"):
            report = target.merge(folder)
        assert 0 < report.read == report.added < 40
        assert target.check().clean
    assert victim.read_bytes() == data


def test_explain_takes_as_many_fields_as_are_known(folder):
    key = MEASUREMENTS[3].key
    wanted = {"problem.batch": key.problem.batch, "protocol": key.protocol}
    with caches.open(folder, "r") as cache:
        assert cache.explain(wanted).found
        assert str(cache.explain(wanted)).startswith("a hit: ")
        explained = cache.explain({**wanted, "software.torch": "2.99"})
        assert [one.field for one in explained.differences] == ["software.torch"]
        assert "software.torch (2.99 wanted, 2.13.0" in str(explained)
        assert explained.entries == 40
        with pytest.raises(ConfigError, match="'time_ns' is not a field of a key"):
            cache.explain({"time_ns": 5})
        with pytest.raises(ConfigError, match="there is no field 'batch'"):
            cache.explain({"batch": 5})
    with caches.open(folder / "none", "r") as cache:
        assert str(cache.explain(wanted)) == "a miss: the cache is empty"
