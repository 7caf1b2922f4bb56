"""Read the union of the files of one kind of device, whatever other processes do to them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from time import time_ns
from typing import TypeAlias

from ucudnn.cache.hdf5.codec import from_data
from ucudnn.cache.hdf5.envelope import FRAME_BYTES, DamagedError, NewerError, verify
from ucudnn.cache.hdf5.files import (
    SEGMENTS,
    SUFFIX,
    is_ours,
    may_be_ours,
    names_in,
    read_file,
    read_frame,
    set_aside,
    unique_name,
)
from ucudnn.cache.table.builder import EMPTY, merged
from ucudnn.cache.table.table import Table


class Severity(Enum):
    """Severity of a finding of a check."""

    NOTE = "worth knowing"
    WRONG = "wrong"
    FIXED = "wrong, and put right"


Say: TypeAlias = Callable[[str, Severity], None]
_ROUNDS = 8
_GONE = (errno.ENOENT, errno.ESTALE)


class Reader:
    """Tables that were read so far, and the files they came from.

    Args:
        root: the cache's folder.
        kind: what the file names begin with.
        writable: False: damaged files stay where they are.
        say: told what could not be read.

    Attributes:
        base: what X.h5 holds.
        base_frame: of the X.h5 that `base` was read from, None where it was from none.
        recent: what the segments hold.
        newest_ns: when the last entry that was seen was stored.
    """

    def __init__(self, root: Path, kind: str, writable: bool, say: Say) -> None:
        self.compacted = root / f"{kind}{SUFFIX}"
        self.segments = root / f"{kind}{SEGMENTS}"
        self.base = self.recent = self._partial = EMPTY
        self.base_frame: bytes | None = None
        self.newest_ns = 0
        self._writable = writable
        self._say = say
        self._listed = False
        self._looked_at: bytes | None = None
        self._fresh: list[Table] = []
        self._whole_by_name: dict[str, bool] = {}
        self._partial_paths: list[Path] = []

    def tables(self) -> tuple[Table, Table, Table]:
        """Everything that was read; what has the same key in two of them counts by its time."""
        if not self._listed:
            self.refresh()
        if self._fresh:
            self.recent = merged([self.recent, *self._fresh])
            self._fresh.clear()
        return self.recent, self.base, self._partial

    def files(self) -> list[Path]:
        """The files with measurements, as they are now."""
        paths = [self.compacted, *(self.segments / name for name in self._segment_names())]
        return [path for path in paths if path.is_file() and may_be_ours(path)]

    def partial_files(self) -> list[Path]:
        """Files that hold more than this version understands; they must stay."""
        return [path for path in self._partial_paths if path.exists()]

    def whole_segments(self) -> list[str]:
        """Names of the segments that `recent` holds all of."""
        return [name for name, whole in self._whole_by_name.items() if whole]

    def refresh(self) -> None:
        """Read the files that are new.

        Compaction may move data between two looks, so it ends with two looks that show the same.
        """
        if not self._listed and os.path.lexists(self.segments) and not self.segments.is_dir():
            self._say(
                f"{self.segments} is not a folder: it was left as it is; move it elsewhere, so "
                f"that measurements can be kept there",
                Severity.WRONG,
            )
        self._listed = True
        seen = None
        for _ in range(_ROUNDS):
            frame, names = read_frame(self.compacted), self._segment_names()
            if (frame, names) == seen:
                break
            seen = (frame, names)
            self._read_compacted(frame)
            for name in names:
                self._read_segment(name)
        self.tables()

    def _segment_names(self) -> list[str]:
        try:
            return [name for name in names_in(self.segments) if name.endswith(SUFFIX)]
        except OSError as error:
            self._say(
                f"{self.segments} cannot be read ({error.strerror}): it is not used",
                Severity.WRONG,
            )
            return []

    def _read_compacted(self, frame: bytes | None) -> None:
        if frame is None or frame in (self.base_frame, self._looked_at):
            return
        self._looked_at = frame
        loaded = self._load(self.compacted)
        if loaded is not None:
            self.base, self.base_frame = loaded
            self.newest_ns = max(self.newest_ns, self.base.newest_ns)

    def _read_segment(self, name: str) -> None:
        if name in self._whole_by_name:
            return
        loaded = self._load(self.segments / name)
        self._whole_by_name[name] = loaded is not None
        if loaded is not None:
            self.add(loaded[0])

    def _load(self, path: Path) -> tuple[Table, bytes] | None:
        """The table of a file and its frame, None where not all of it can be used."""
        try:
            if not is_ours(path):
                self._leave(path)
                return None
            data = read_file(path)
            verify(data)
            table, complete = from_data(data)
        except NewerError as error:
            self._partial_paths.append(path)
            self._say(f"{path} was left alone: {error}; upgrade ucudnn to use it", Severity.NOTE)
        except DamagedError as error:
            self._put_aside(path, error)
        except OSError as error:
            if error.errno not in _GONE:  # moved by a compaction: the next look shows where to
                self._say(
                    f"{path} cannot be read ({error.strerror}): its measurements are not used",
                    Severity.WRONG,
                )
        else:
            if complete:
                return table, data[:FRAME_BYTES]
            self._partial_paths.append(path)
            self._partial = merged([self._partial, table])
            self.newest_ns = max(self.newest_ns, table.newest_ns)
        return None

    def _put_aside(self, path: Path, error: DamagedError) -> None:
        aside = None
        if self._writable:
            with suppress(OSError):
                aside = set_aside(path)
        if aside is not None and self._was_replaced(aside):
            return
        where = f"it was kept as {aside.name}" if aside else "it was left where it is"
        self._say(
            f"{path} is damaged ({error}) and is not used: {where}; "
            f"`ucudnn cache check --fix` recovers what it can",
            Severity.FIXED if aside else Severity.WRONG,
        )

    def _leave(self, path: Path) -> None:
        self._say(
            f"{path} is not a file of this cache, or is damaged beyond recognition: it was left as "
            f"it is and is not used; move it elsewhere",
            Severity.WRONG,
        )

    def _was_replaced(self, aside: Path) -> bool:
        """True if another process had put a sound file there just before the move."""
        try:
            data = read_file(aside)
            with suppress(NewerError):
                verify(data)
                from_data(data)
            os.rename(aside, self.segments / unique_name(time_ns()))
        except (OSError, DamagedError):
            return False
        return True

    def add(self, table: Table) -> None:
        """Take in entries that were put here, or read."""
        self._fresh.append(table)
        self.newest_ns = max(self.newest_ns, table.newest_ns)

    def note_own(self, name: str) -> None:
        """Remember that a segment holds what was added here."""
        self._whole_by_name[name] = True

    def replace_recent(self, table: Table, names: Iterable[str]) -> None:
        """Remember that these segments took the place of those that were whole."""
        self.recent = table
        for name in self.whole_segments():
            del self._whole_by_name[name]
        self._whole_by_name.update(dict.fromkeys(names, True))

    def drop_base(self) -> None:
        """Remember that X.h5 is no more; `recent` holds all of it."""
        self.base, self.base_frame = EMPTY, None

    def promote(self, name: str, frame: bytes | None) -> None:
        """Remember that the only whole segment became X.h5."""
        self.base, self.base_frame, self.recent = self.recent, frame, EMPTY
        del self._whole_by_name[name]

    def forget_listing(self) -> None:
        """Look for new files when something is next asked for."""
        self._listed = False
