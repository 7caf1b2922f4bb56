"""What each `ucudnn cache` command does: opens, does one thing, closes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ucudnn import cache as caches
from ucudnn import testing
from ucudnn.cache import Entry, commands
from ucudnn.errors import CacheError, ConfigError
from ucudnn.measurement import Measurement

MEASUREMENTS = testing.sample_measurements(40, seed=6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache with MEASUREMENTS."""
    with caches.open(tmp_path / "cache") as cache:
        cache.put(MEASUREMENTS)
    return tmp_path / "cache"


def test_info_counts(folder: Path) -> None:
    info = commands.info(folder)
    assert info.location == str(folder)
    assert info.records == 40
    assert info.files == 2
    assert info.file_bytes == sum(path.stat().st_size for path in folder.glob("*.h5"))
    assert info.writable


def test_a_folder_that_cannot_be_written_is_said_to_be_read_only(folder: Path) -> None:
    file = folder.parent / "a file"
    file.write_text("")
    assert not commands.info(file / "cache").writable


def test_check_only_looks_unless_told_to_fix(folder: Path) -> None:
    assert commands.check(folder).clean
    victim = min(folder.glob("*.h5"))
    os.truncate(victim, 100)
    before = sorted(folder.rglob("*"))
    report = commands.check(folder)
    assert not report.clean
    assert len(report.problems) == 1
    assert str(victim) in report.problems[0]
    assert sorted(folder.rglob("*")) == before
    fixed = commands.check(folder, fix=True)
    assert fixed.clean
    assert str(victim) in fixed.fixed[0]
    assert commands.check(folder).clean


def test_merge_adds_several(folder: Path, tmp_path: Path) -> None:
    with caches.open(tmp_path / "other") as cache:
        cache.put(testing.sample_measurements(60, seed=6)[30:])
    target = tmp_path / "target"
    report = commands.merge([folder, tmp_path / "other"], target)
    assert (report.read, report.added) == (70, 60)
    assert commands.info(target).records == 60
    with pytest.raises(CacheError, match="there is no cache in .*nowhere"):
        commands.merge([tmp_path / "nowhere"], target)


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
def test_what_says_more_replaces_a_quiet_measurement(loaded: str, quiet: str, may: bool) -> None:
    some = testing.sample_measurements(1, seed=6)[0]
    one, other = (
        Measurement(some.key, status, 9 if status in ("ok", "screened") else None, load=load)
        for status, load in ((loaded, 1.0), (quiet, 0.0))
    )
    assert one.may_replace(other) == may
    assert other.may_replace(one)


@pytest.mark.parametrize("is_here", [True, False], ids=["loaded here", "loaded there"])
@pytest.mark.parametrize("target", ["folder", "memory"])
def test_merge_prefers_what_was_taken_without_load(
    is_here: bool, target: str, tmp_path: Path
) -> None:
    samples = testing.sample_measurements(60, seed=6)
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


def test_merge_passes_over_a_damaged_file_of_the_other(folder: Path, tmp_path: Path) -> None:
    victim = min(folder.glob("*.h5"))
    os.truncate(victim, victim.stat().st_size // 2)
    data = victim.read_bytes()
    with pytest.warns(caches.CacheWarning, match="damaged"):
        report = commands.merge([folder], tmp_path / "target")
    assert 0 < report.read == report.added < 40
    assert victim.read_bytes() == data
    assert commands.check(tmp_path / "target").clean


def test_export_and_import_go_together(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "failed.csv"
    assert commands.export(file, folder, ["status=failed"]) == 10
    target = tmp_path / "target"
    assert commands.import_(file, target) == 10
    with caches.open(target, "r") as cache:
        assert {one.status for one in cache} == {"failed"}
    with pytest.raises(ConfigError, match="a filter is written field=value, got 'failed'"):
        commands.export(file, folder, ["failed"])


def test_prune_wants_to_be_told_what(folder: Path) -> None:
    with pytest.raises(ConfigError, match="name a field=value or an age"):
        commands.prune(folder)
    assert commands.prune(folder, ["status=failed"], dry_run=True) == 10
    assert commands.info(folder).records == 40
    assert commands.prune(folder, ["status=failed"]) == 10
    assert commands.prune(folder, ["status=failed"]) == 0
    assert commands.info(folder).records == 30


def test_prune_by_age(folder: Path) -> None:
    old = replace(MEASUREMENTS[0], key=replace(MEASUREMENTS[0].key, protocol=9))
    with caches.open(folder) as cache:
        cache.put_entries([Entry(old, stored_ns=10**18)])
    assert commands.prune(folder, older_than_days=365, dry_run=True) == 1
    assert commands.prune(folder, older_than_days=365) == 1
    assert commands.info(folder).records == 40


def test_explain_takes_as_many_fields_as_are_known(folder: Path) -> None:
    key = MEASUREMENTS[3].key
    words = [f"problem.batch={key.problem.batch}", f"protocol={key.protocol}"]
    assert commands.explain(words, folder).found
    assert str(commands.explain(words, folder)).startswith("a hit: ")
    explained = commands.explain([*words, "software.torch=2.99"], folder)
    assert [one.field for one in explained.differences] == ["software.torch"]
    assert "software.torch (2.99 wanted, 2.13.0" in str(explained)
    assert explained.entries == 40
    assert str(commands.explain(words, folder / "none")) == "a miss: the cache is empty"
    with pytest.raises(ConfigError, match="'time_ns' is not a field of a key"):
        commands.explain(["time_ns=5"], folder)
    with pytest.raises(ConfigError, match="there is no field 'batch'"):
        commands.explain(["batch=5"], folder)
