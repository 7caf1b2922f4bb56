"""Commands of `ucudnn cache`: each is a function that opens a cache and closes it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from time import time_ns

from ucudnn import cache as caches
from ucudnn.cache.entries import CacheInfo, CheckReport, Entry, Explanation, MergeReport
from ucudnn.cache.explain import explain as explain_texts
from ucudnn.cache.table.schema import matches, parse_where
from ucudnn.errors import ConfigError

PathLike = str | os.PathLike[str]
_DAY_NS = 24 * 3600 * 10**9


def info(path: PathLike | None = None) -> CacheInfo:
    """Location and contents of the cache in a folder.

    >>> info("no/such/folder").records
    0

    Args:
        path: the folder; None: the user's cache.
    """
    with caches.open(path, "r") as cache:
        return cache.info()


def check(path: PathLike | None = None, fix: bool = False) -> CheckReport:
    """Read every file of a cache and report what is wrong.

    >>> check("no/such/folder").clean
    True

    Args:
        path: the folder; None: the user's cache.
        fix: set damaged files aside, recover their sound entries, remove leftovers.
    """
    # A cache opened for writing would set damaged files aside without being told to fix them.
    with caches.open(path, "a" if fix else "r") as cache:
        return cache.check(fix)


def merge(sources: Iterable[PathLike], path: PathLike | None = None) -> MergeReport:
    """Add the entries of other caches, which are only read.

    >>> import tempfile
    >>> merge([tempfile.mkdtemp()], tempfile.mkdtemp())
    MergeReport(read=0, added=0)

    Args:
        sources: folders of other caches.
        path: the folder of the cache that is added to; None: the user's cache.

    Raises:
        CacheError: a source is no folder, or the cache cannot be written.
    """
    with caches.open(path) as cache:
        reports = [cache.merge(source) for source in sources]
    return MergeReport(
        read=sum(report.read for report in reports), added=sum(report.added for report in reports)
    )


def entries(path: PathLike | None = None, where: Iterable[str] = ()) -> list[Entry]:
    """List entries: those of one device, one problem and one role together, the fastest first.

    >>> entries("no/such/folder", ["status=ok"])
    []

    Args:
        path: the folder of the cache; None: the user's cache.
        where: only entries that match all of these, such as "status=ok".

    Raises:
        ConfigError: a bad filter.
    """
    texts = parse_where(where)

    def order(entry: Entry) -> tuple[str, str, str, bool, int]:
        key, time_ns = entry.measurement.key, entry.measurement.time_ns
        role = str(key.conditions.role)
        # What was not timed comes last.
        return str(key.device), str(key.problem), role, time_ns is None, time_ns or 0

    with caches.open(path, "r") as cache:
        return sorted((one for one in cache.entries() if matches(one, texts)), key=order)


def export(target: PathLike, path: PathLike | None = None, where: Iterable[str] = ()) -> int:
    """Write entries to a .csv or .json file, and count them.

    >>> import tempfile
    >>> export(f"{tempfile.mkdtemp()}/failed.csv", "no/such/folder", ["status=failed"])
    0

    Args:
        target: the file.
        path: the folder of the cache; None: the user's cache.
        where: only entries that match all of these, such as "status=ok".

    Raises:
        ConfigError: a bad filter.
        CacheError: another suffix, or the file cannot be written.
    """
    with caches.open(path, "r") as cache:
        return cache.export(target, parse_where(where))


def import_(source: PathLike, path: PathLike | None = None, layers: Iterable[PathLike] = ()) -> int:
    """Add the entries of a file, and count them: all of them, or none if one is bad.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> _ = export(f"{folder}/timings.json", folder)
    >>> import_(f"{folder}/timings.json", folder)
    0

    Args:
        source: a .csv or .json that `export` wrote, or a probe's timings.csv.
        path: the folder of the cache; None: the user's cache.
        layers: the layer tables that the probe was given.

    Raises:
        CacheError: the file cannot be read, or holds a bad value; the message names the line.
    """
    tables = list(layers)
    with caches.open(path) as cache:
        if not tables:
            return cache.import_(source)
        # Only here, because it loads the reader of layer tables.
        from ucudnn.cache.exchange.probe import read_probe

        entries = read_probe(source, tables)
        cache.put_entries(entries)
        return len(entries)


def prune(
    path: PathLike | None = None,
    where: Iterable[str] = (),
    older_than_days: float | None = None,
    dry_run: bool = False,
) -> int:
    """Remove entries that match, and count them.

    >>> prune("no/such/folder", ["software.cudnn=9.27.0"], older_than_days=90, dry_run=True)
    0

    Args:
        path: the folder of the cache; None: the user's cache.
        where: only entries that match all of these, such as "software.cudnn=9.27.0".
        older_than_days: only entries that were stored longer ago.
        dry_run: only count.

    Raises:
        ConfigError: nothing says which entries to remove.
        CacheError: the cache cannot be written.
    """
    texts = parse_where(where)
    # An empty filter matches every entry, and a slip must not empty a cache.
    if not texts and older_than_days is None:
        raise ConfigError(
            "prune removes what matches and was given no filter; name a field=value or an age"
        )
    before_ns = None if older_than_days is None else time_ns() - round(older_than_days * _DAY_NS)
    # Read-only, so that a dry run cannot change anything.
    with caches.open(path, "r" if dry_run else "a") as cache:
        if not dry_run:
            return cache.prune(texts, before_ns)
        return sum(matches(entry, texts, before_ns) for entry in cache.entries())


def explain(where: Iterable[str], path: PathLike | None = None) -> Explanation:
    """Explain whether an entry has these values, and if not, in which the nearest one differs.

    >>> print(explain(["problem.batch=32"], "no/such/folder"))
    a miss: the cache is empty

    Args:
        where: fields of a key, such as "problem.batch=32" or "software.cudnn=9.28.0".
        path: the folder of the cache; None: the user's cache.

    Raises:
        ConfigError: there is no such field.
    """
    with caches.open(path, "r") as cache:
        found = explain_texts(parse_where(where), (measurement.key for measurement in cache))
        if not found.found or found.nearest is None:
            return found
        return replace(found, measurement=cache.get(found.nearest))
