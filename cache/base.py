"""The contract of a measurement cache, with the methods that are the same in every cache."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Self

from ucudnn.cache.entries import Entry, Explanation, KeyDifference, MergeReport
from ucudnn.cache.schema import (
    FIELD_BY_NAME,
    KEY_FIELDS,
    matches,
    parse_where,
    read_entries,
    write_entries,
)
from ucudnn.errors import ConfigError
from ucudnn.measurement import Measurement, MeasurementKey


class AbstractCache(ABC):
    """Measurements by key.

    When `put` returns, `get` finds the measurements, in this process and in every later one. If two
    measurements have the same key, `get` returns the one stored later. If the disk cannot be
    written, `put` raises no error: one warning says so, and the measurements are kept in memory.
    """

    @abstractmethod
    def get(self, key: MeasurementKey) -> Measurement | None:
        """The latest measurement with this key, or None."""

    @abstractmethod
    def put_entries(self, entries: Iterable[Entry]) -> None:
        """Keep entries with their times of storage; those without a time get the present one.

        Raises:
            CacheError: the cache is read-only, or a number needs more than 64 bits.
        """

    @abstractmethod
    def entries(self) -> Iterator[Entry]:
        """Every entry, one per key."""

    def merge(self, path: str | os.PathLike[str]) -> MergeReport:
        """Add the entries of another cache, which is only read.

        Of two entries with the same key the one stored later is kept. There is one exception: an
        entry that was measured under load replaces one without load only if it adds something, for
        example a time where there was none.

        Raises:
            CacheError: there is no cache at the path, or this cache is read-only.
        """
        # Imported only here, because `store` loads h5py.
        from ucudnn.cache.store import open_existing

        before, entries = len(self), list(open_existing(path).entries())
        pairs = [
            (entry.measurement, known)
            for entry in entries
            if (known := self.get(entry.measurement.key)) is not None
        ]
        self.put_entries(entries)
        # The entry stored later is kept. So measurements that must not be replaced by those taken
        # under load are put once more, with the present time.
        self.put(known for other, known in pairs if not other.may_replace(known))
        self.put(other for other, known in pairs if not known.may_replace(other))
        return MergeReport(read=len(entries), added=len(self) - before)

    def refresh(self) -> None:  # noqa: B027 - a cache of one process has nothing to do
        """Read entries that other processes have put since."""

    def close(self) -> None:  # noqa: B027 - the same
        """Write entries that could not be written so far, and merge files; reading still works."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def put(self, measurements: Iterable[Measurement]) -> None:
        """Keep measurements; a cache on disk has written them when this returns, if it can.

        Args:
            measurements: of any devices; those of one kind of device are kept all together or not
                at all.

        Raises:
            CacheError: the cache is read-only, or a number needs more than 64 bits.
        """
        self.put_entries([Entry(measurement) for measurement in measurements])

    def __iter__(self) -> Iterator[Measurement]:
        return (entry.measurement for entry in self.entries())

    def __len__(self) -> int:
        return sum(1 for _ in self.entries())

    def __bool__(self) -> bool:
        # Without this method, `if cache:` would count all entries, and be false for an empty cache.
        return True

    def export(
        self, path: str | os.PathLike[str], where: Mapping[str, object] | None = None
    ) -> int:
        """Write entries to a .csv file, and count them; `import_` reads the file back.

        Args:
            path: the file; a reader sees the old contents or the new ones, never a part.
            where: values by field name; only entries that match are written. None: all entries.

        Raises:
            ConfigError: entries do not have a field that `where` names.
            CacheError: the suffix is not .csv, or the file cannot be written.
        """
        # The filter is parsed first, because a bad filter must not leave a new file.
        texts = parse_where(where or {})
        return write_entries(path, (one for one in self.entries() if matches(one, texts)))

    def import_(self, path: str | os.PathLike[str]) -> int:
        """Read a file that `export` wrote, and count its entries; all entries are kept, or none.

        Raises:
            CacheError: the file cannot be read; the message names the line.
        """
        # The whole file is parsed before any entry is kept.
        entries = read_entries(path)
        self.put_entries(entries)
        return len(entries)

    def explain(self, key: MeasurementKey | Mapping[str, object]) -> Explanation:
        """Say whether the cache has a key, and if not, in which fields the nearest entry differs.

        The nearest entry is the one that differs in the fewest fields; among several, the one that
        differs in the fewest fields of problem and algorithm; if these are equal, too, the first.

        Args:
            key: a key, or values of some of its fields, such as {"problem.batch": 32}.

        Raises:
            ConfigError: keys do not have a field that is named.
        """
        wanted = key_texts(key) if isinstance(key, MeasurementKey) else parse_where(key)
        known = [field.name for field in KEY_FIELDS]
        for name in wanted:
            if name not in known:
                raise ConfigError(f"{name!r} is not a field of a key; those are {', '.join(known)}")
        count, nearest, least = 0, Explanation(0, None), (len(KEY_FIELDS) + 1, 0)
        for entry in self.entries():
            count += 1
            there = ((name, text, FIELD_BY_NAME[name].text(entry)) for name, text in wanted.items())
            differences = tuple(KeyDifference(*one) for one in there if one[1] != one[2])
            # Another version of cuDNN explains a miss better than another layer does.
            of_work = sum(one.field.startswith(("problem.", "algorithm")) for one in differences)
            if (len(differences), of_work) < least:
                least = (len(differences), of_work)
                nearest = Explanation(0, entry.measurement.key, differences)
        return replace(nearest, entries=count)


def key_texts(key: MeasurementKey) -> dict[str, str]:
    """Every field of a key as text, by name."""
    entry = Entry(Measurement(key, "untimed"))
    return {field.name: field.text(entry) for field in KEY_FIELDS}
