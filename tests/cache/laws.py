"""Laws that every cache keeps, as functions of one that opens it; and sample measurements."""

from __future__ import annotations

import errno
import math
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from ucudnn import cache as caches
from ucudnn.cache import AbstractCache, Entry, MemoryCache
from ucudnn.cache.store import HDF5Cache
from ucudnn.measurement import (
    STATUSES,
    Conditions,
    Device,
    FailureKind,
    Measurement,
    MeasurementKey,
    Role,
    Software,
)
from ucudnn.problem import BYTES_BY_DTYPE, LAYOUTS, MATHS, OPS, Problem

# Opens the same cache each time: what one put, the next one finds.
OpenCache: TypeAlias = Callable[[], AbstractCache]
CacheLaw: TypeAlias = Callable[[OpenCache], None]

# Of two kinds, because a cache keeps each kind of device apart.
_GPU = Device("cuda", "NVIDIA H200", "", 132, "9.0", 150_754_820_096, 700, "")
_CPU = Device("cpu", "A Processor 9000 @ 3.0GHz", "AVX512", 64)
# Texts that file formats get wrong: line ends and quotes (CSV), NUL (C strings in HDF5), and half a
# surrogate pair, which UTF-8 cannot hold.
_TEXTS = ("", "plain", 'two\nlines, and "quotes"', "zero \0 byte", "µ-cuDNN ✓ 卷积", "\udcff", "\r")
# Absent, zero, and more than 32 bits can hold.
_NUMBERS = (None, 0, 1, 987_654_321, 2**62)
# A result with infinite or undefined elements has an error that is so, too.
_ERRORS = (None, 0.0, 1e-7, 0.1, math.inf, math.nan)

# Values other than those of `_plain_key`, for fields that do not take any text or number.
_OTHER_VALUES: dict[str, Any] = {
    "op": "wgrad",
    "in_channels": 44,
    "out_channels": 44,
    "input_size": (33, 32),
    "kernel_size": (2, 1),
    "stride": (1, 2),
    "padding": ((1, 1), (1, 2)),
    "dilation": (2, 1),
    "dtype": "float16",
    "layout": "nhwc",
    "math": "tf32",
    "role": "later",
}


def sample_measurements(count: int, seed: int = 0) -> list[Measurement]:
    """Measurements with different keys, which together contain every kind of value.

    >>> len({measurement.key for measurement in sample_measurements(100)})
    100

    Args:
        count: how many.
        seed: equal seeds give equal measurements.
    """
    chance = random.Random(seed)
    return [_sample(chance, index) for index in range(count)]


def samples_of_one_device() -> list[Measurement]:
    """20 measurements, whose segments a cache keeps in cpu-one.h5.d."""
    return [
        replace(one, key=replace(one.key, device=Device("cpu", "one")))
        for one in sample_measurements(60, seed=9)[1::3]
    ]


def _sample(chance: random.Random, index: int) -> Measurement:
    # In turn, so that a few samples already have every status.
    status = STATUSES[index % len(STATUSES)]
    timed = status in ("ok", "screened")
    samples = [chance.randrange(1, 10**9) for _ in range(chance.randrange(6))] if timed else []
    return Measurement(
        key=_sample_key(chance, index),
        status=status,
        time_ns=chance.randrange(1, 10**10) if timed else None,
        spread_ns=chance.choice(_NUMBERS) if timed else None,
        samples=tuple(samples),
        workspace_bytes=chance.choice(_NUMBERS),
        error=chance.choice(_ERRORS),
        reason=chance.choice(_TEXTS) if status == "failed" else "",
        notes=tuple(chance.sample(_TEXTS, chance.randrange(3))),
        failure=chance.choice((None, *FailureKind)) if status == "failed" else None,
        lost_to=chance.choice(_TEXTS) if status == "screened" else "",
        implementation=chance.choice(_TEXTS),
        is_deterministic=bool(chance.randrange(2)),
        adds_bias=bool(chance.randrange(2)),
        load=chance.choice((0.0, 1.5)),
    )


def _sample_key(chance: random.Random, index: int) -> MeasurementKey:
    rank = 1 + index % 3

    def sizes(low: int, high: int) -> tuple[int, ...]:
        return tuple(chance.randrange(low, high) for _ in range(rank))

    # The batch alone makes every key different. Channels are multiples of 4, which all groups
    # divide, and inputs are larger than any dilated kernel.
    problem = Problem(
        op=chance.choice(OPS),
        batch=1 + index,
        in_channels=4 * chance.randrange(1, 9),
        out_channels=4 * chance.randrange(1, 9),
        input_size=sizes(16, 65),
        kernel_size=sizes(1, 4),
        stride=sizes(1, 3),
        padding=tuple((begin, chance.randrange(3)) for begin in sizes(0, 3)),
        dilation=sizes(1, 3),
        groups=chance.choice((1, 2, 4)),
        dtype=chance.choice(list(BYTES_BY_DTYPE)),
        layout=chance.choice(LAYOUTS),
        math=chance.choice(MATHS),
    )
    if chance.randrange(2):
        software = Software("2.13.0", cudnn=chance.choice(("9.27.0", "9.28.0")), driver="610.1")
        conditions = Conditions(chance.choice(tuple(Role)), ranks_per_device=1 + index % 2)
        return MeasurementKey(problem, "eng67_k2=20_k13=0", _GPU, software, conditions, 1)
    software = Software("2.13.0+cpu", onednn="3.11.2")
    conditions = Conditions(
        chance.choice(tuple(Role)), threads=2, allocator="glibc,mmap_threshold=1"
    )
    return MeasurementKey(problem, chance.choice(_TEXTS[1:]), _CPU, software, conditions, 2)


def texts(measurements: Iterable[Measurement | None]) -> list[str]:
    """Measurements as texts, which compare equal even if an error is nan."""
    return sorted(map(repr, measurements))


def _found(cache: AbstractCache, measurements: Iterable[Measurement]) -> list[Measurement]:
    """Results of looking up the keys of some measurements, without the misses."""
    return list(filter(None, (cache.get(one.key) for one in measurements)))


def _variations(key: MeasurementKey) -> dict[str, MeasurementKey]:
    """Keys that differ from a given one in a single field, by the name of the field."""
    keys = {"algorithm": replace(key, algorithm="another"), "protocol": replace(key, protocol=99)}
    for part in ("problem", "device", "software", "conditions"):
        values = getattr(key, part)
        for field in fields(values):
            varied = replace(
                values, **{field.name: _other(field.name, getattr(values, field.name))}
            )
            keys[f"{part}.{field.name}"] = replace(key, **{part: varied})
    return keys


def _other(name: str, value: Any) -> Any:
    if name in _OTHER_VALUES:
        return _OTHER_VALUES[name]
    return value + 1 if isinstance(value, int) else f"other {value}"


def _plain_key() -> MeasurementKey:
    problem = Problem("fprop", 8, 32, 64, (32, 32), (1, 1), padding=((1, 1), (1, 1)))
    return MeasurementKey(problem, "gemm", _GPU, Software("2.13"), Conditions(), 1)


def refuse(*_: object, **__: object) -> None:
    """Fail as an operation that the file system does not have, such as a file lock."""
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def require_sound(cache: AbstractCache) -> None:
    """A cache in a folder finds nothing wrong with its files."""
    assert not isinstance(cache, HDF5Cache) or cache.check().clean


def is_empty_at_first(open_cache: OpenCache) -> None:
    """A new cache is empty and says so, and is true nevertheless."""
    with open_cache() as cache:
        assert cache.get(_plain_key()) is None
        assert list(cache) == []
        assert len(cache) == 0
        # A container of length 0 is false for Python, and `cache or other` would not use it.
        assert cache
        assert not cache.explain(_plain_key()).found
        cache.put([])
        assert len(cache) == 0
        require_sound(cache)


def finds_what_was_put(open_cache: OpenCache) -> None:
    """Every value is found as it was put, also after reopening; other keys are not found."""
    measurements = sample_measurements(300)
    others = sample_measurements(330)[300:]
    with open_cache() as cache:
        # In two calls, one of them with an iterator, which can be read only once.
        cache.put(measurements[:100])
        cache.put(iter(measurements[100:]))
        # The second time the cache may answer from memory.
        for _ in range(2):
            assert texts(_found(cache, measurements)) == texts(measurements)
            assert not _found(cache, others)
    # A second opening knows only what the first one wrote.
    with open_cache() as cache:
        assert texts(_found(cache, measurements)) == texts(measurements)
        assert texts(cache) == texts(measurements)
        assert len(cache) == 300
        require_sound(cache)


def tells_keys_apart_by_every_field(open_cache: OpenCache) -> None:
    """A key that differs in one field is another key, and a miss names that field."""
    key = _plain_key()
    with open_cache() as cache:
        cache.put([Measurement(key, "ok", 100)])
        for name, other in _variations(key).items():
            assert cache.get(other) is None, name
            explained = cache.explain(other)
            assert [one.field for one in explained.differences] == [name]
            assert name in str(explained)
        assert cache.explain(key).found
        varied = [
            Measurement(other, "ok", 200 + place)
            for place, other in enumerate(_variations(key).values())
        ]
        cache.put(varied)
        assert _found(cache, varied) == varied
        assert cache.get(key) == Measurement(key, "ok", 100)
        require_sound(cache)


def lets_the_later_measurement_count(open_cache: OpenCache) -> None:
    """The later of two measurements with one key counts."""
    key = _plain_key()
    with open_cache() as cache:
        # Within one call the order counts as well.
        cache.put([Measurement(key, "untimed", workspace_bytes=5), Measurement(key, "ok", 1)])
        assert cache.get(key) == Measurement(key, "ok", 1)
        # Neither the smallest time nor the largest counts, but the last.
        for time_ns in (9, 3, 7):
            cache.put([Measurement(key, "ok", time_ns)])
            assert cache.get(key) == Measurement(key, "ok", time_ns)
        # Entries say when they were stored, so that an old one which comes late is still old.
        cache.put_entries([Entry(Measurement(key, "failed", reason="old"), stored_ns=1)])
        assert cache.get(key) == Measurement(key, "ok", 7)
        assert len(cache) == 1
    with open_cache() as cache:
        assert list(cache) == [Measurement(key, "ok", 7)]
        require_sound(cache)


def exports_by_any_field(open_cache: OpenCache) -> None:
    """A filter exports what a plain loop over all entries would select."""
    measurements = sample_measurements(200, seed=1)
    with tempfile.TemporaryDirectory() as folder, open_cache() as cache:
        cache.put(measurements)
        for where, wanted in (
            ({"problem.op": "wgrad"}, lambda one: one.key.problem.op == "wgrad"),
            ({"status": "failed"}, lambda one: one.status == "failed"),
            ({"problem.batch": 7}, lambda one: one.key.problem.batch == 7),
            (
                {"conditions.ranks_per_device": 2},
                lambda one: one.key.conditions.ranks_per_device == 2,
            ),
            ({"workspace_bytes": None}, lambda one: one.workspace_bytes is None),
            (
                {"problem.dtype": "float16", "software.cudnn": "9.27.0"},
                lambda one: (
                    (one.key.problem.dtype, one.key.software.cudnn) == ("float16", "9.27.0")
                ),
            ),
        ):
            cache.export(f"{folder}/some.csv", where)
            with MemoryCache() as other:
                other.import_(f"{folder}/some.csv")
                assert texts(other) == texts(filter(wanted, measurements))


def survives_export_and_import(open_cache: OpenCache) -> None:
    """A CSV file holds every entry completely, with storage times."""
    with tempfile.TemporaryDirectory() as folder, open_cache() as cache:
        cache.put(sample_measurements(100))
        entries = sorted(map(repr, cache.entries()))
        path = Path(folder, "timings.csv")
        assert cache.export(path) == 100
        with MemoryCache() as other:
            assert other.import_(path) == 100
            assert sorted(map(repr, other.entries())) == entries
        # What is there already is read, and changes nothing.
        assert cache.import_(path) == 100
        assert sorted(map(repr, cache.entries())) == entries
        require_sound(cache)


def merges_a_folder(open_cache: OpenCache) -> None:
    """Merging adds each missing entry once, and the later of two entries counts."""
    measurements = sample_measurements(90, seed=2)
    with tempfile.TemporaryDirectory() as folder, open_cache() as cache:
        cache.put(measurements[:50])
        with caches.open(folder) as other:
            other.put(measurements[30:])
            newer = replace(measurements[30], status="failed", time_ns=None, spread_ns=None)
            other.put([newer])
        newest = replace(measurements[32], status="failed", time_ns=None, spread_ns=None)
        cache.put([newest])
        wanted = [*measurements[:30], newer, measurements[31], newest, *measurements[33:]]
        # 20 of the 60 keys are here already, and after the first merge all are.
        for added in (40, 0):
            report = cache.merge(folder)
            assert (report.read, report.added) == (60, added)
            assert texts(cache) == texts(wanted)
        require_sound(cache)


def prunes_what_matches(open_cache: OpenCache) -> None:
    """Pruning permanently removes the entries that match, and no others."""
    measurements = sample_measurements(120, seed=3)
    stay = [one for one in measurements if one.key.software.cudnn != "9.27.0"]
    with open_cache() as cache:
        cache.put(measurements[:60])
        cache.put(measurements[60:])
        assert cache.prune({"software.cudnn": "9.26.0"}) == 0
        assert cache.prune({"software.cudnn": "9.27.0"}) == len(measurements) - len(stay) > 0
        assert texts(cache) == texts(stay)
    with open_cache() as cache:
        assert texts(cache) == texts(stay)
        assert cache.prune({}) == len(stay)
        assert len(cache) == 0
        assert cache.check().clean


def counts_what_it_holds(open_cache: OpenCache) -> None:
    """The summary agrees with a count by hand."""
    measurements = sample_measurements(80, seed=4)
    with open_cache() as cache:
        cache.put(measurements)
        info = cache.info()
        assert info.records == len(cache) == len(measurements)
        for device in info.devices:
            mine = [one for one in measurements if one.key.device == device.device]
            assert device.records == len(mine) > 0
            # a Counter compares a status without records as 0
            assert Counter(dict(device.records_by_status)) == Counter(one.status for one in mine)
            assert sum(dict(device.versions).values()) == len(mine)
        assert len(info.devices) == 2


LAWS: tuple[CacheLaw, ...] = (
    is_empty_at_first,
    finds_what_was_put,
    tells_keys_apart_by_every_field,
    lets_the_later_measurement_count,
    exports_by_any_field,
    survives_export_and_import,
    merges_a_folder,
)
# Of caches in a folder.
FOLDER_LAWS: tuple[CacheLaw, ...] = (*LAWS, prunes_what_matches, counts_what_it_holds)
