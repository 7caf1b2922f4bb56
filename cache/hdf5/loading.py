"""Load single files: verify, decode, set aside the damaged ones, and report what is not used."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time_ns

from ucudnn.cache.hdf5.codec import decode
from ucudnn.cache.hdf5.device_files import DeviceFiles
from ucudnn.cache.hdf5.envelope import ENVELOPE_BYTES, DamagedError, NewerError, verify
from ucudnn.cache.hdf5.files import is_ours, read_envelope, read_file, set_aside, unique_name
from ucudnn.cache.hdf5.findings import Report, Severity
from ucudnn.cache.table.builder import EMPTY
from ucudnn.cache.table.table import Table

_GONE = (errno.ENOENT, errno.ESTALE)


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """Contents of a sound file.

    Args:
        table: entries that this version understands.
        envelope: first bytes of the file.
        complete: False if a later version wrote more than the table.
    """

    table: Table
    envelope: bytes
    complete: bool


@dataclass(frozen=True, slots=True)
class Loader:
    """Lists and loads the files of one kind of device.

    Args:
        files: the files of that kind.
        writable: False: damaged files stay where they are.
        report: called with findings about files that cannot be used.
    """

    files: DeviceFiles
    writable: bool
    report: Report

    def require_folder(self) -> None:
        """Report a file that is in the place of the folder of segments."""
        folder = self.files.segments
        # A link that leads nowhere is there for lexists alone.
        if os.path.lexists(folder) and not folder.is_dir():
            self.report(
                f"{folder} is not a folder: it was left as it is; move it elsewhere, so that "
                f"measurements can be kept there",
                Severity.WRONG,
            )

    def listing(self) -> tuple[bytes | None, list[str]]:
        """First bytes of X.h5, and the names of the segments."""
        envelope = read_envelope(self.files.compacted)
        try:
            return envelope, self.files.segment_names()
        except OSError as error:
            self.report(
                f"{self.files.segments} cannot be read ({error.strerror}): it is not used",
                Severity.WRONG,
            )
            return envelope, []

    def load(self, path: Path) -> LoadedFile | None:
        """Load a file; None if it is gone, or cannot be used, which is reported then."""
        try:
            # First of all: a file that is not a cache's must never be renamed.
            if not is_ours(path):
                self._report_foreign(path)
                return None
            content = read_file(path)
            verify(content)
            table, complete = decode(content)
        except NewerError as error:
            # Not damaged, so it must stay; with its empty table it counts as incomplete.
            self.report(f"{path} was left alone: {error}; upgrade ucudnn to use it", Severity.NOTE)
            return LoadedFile(EMPTY, b"", complete=False)
        except DamagedError as error:
            self._put_aside(path, error)
        except OSError as error:
            # A compaction has moved its entries to a file that the next listing shows.
            if error.errno not in _GONE:
                self.report(
                    f"{path} cannot be read ({error.strerror}): its measurements are not used",
                    Severity.WRONG,
                )
        else:
            return LoadedFile(table, content[:ENVELOPE_BYTES], complete)
        return None

    def _report_foreign(self, path: Path) -> None:
        self.report(
            f"{path} is not a file of this cache, or is damaged beyond recognition: it was left as "
            f"it is and is not used; move it elsewhere",
            Severity.WRONG,
        )

    def _put_aside(self, path: Path, error: DamagedError) -> None:
        aside = None
        if self.writable:
            # The folder may be read-only, or another process may have moved the file.
            with suppress(OSError):
                aside = set_aside(path)
        if aside is not None and self._put_back(aside):
            return
        where = f"it was kept as {aside.name}" if aside else "it was left where it is"
        self.report(
            f"{path} is damaged ({error}) and is not used: {where}; "
            f"`ucudnn cache check --fix` recovers what it can",
            Severity.FIXED if aside else Severity.WRONG,
        )

    def _put_back(self, aside: Path) -> bool:
        """Make a file that was set aside a segment, if it is sound after all."""
        # Another process may have put a sound file there between our reading and renaming.
        try:
            content = read_file(aside)
            with suppress(NewerError):
                verify(content)
                decode(content)
            os.rename(aside, self.files.segments / unique_name(time_ns()))
        except (OSError, DamagedError):
            return False
        return True
