"""Check every file of a cache, and repair it on request."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ucudnn.cache.entries import CheckReport
from ucudnn.cache.hdf5.device_files import DeviceFiles
from ucudnn.cache.hdf5.files import foreign_in, is_set_aside, kinds_in, mark_salvaged
from ucudnn.cache.hdf5.findings import Severity
from ucudnn.cache.hdf5.recovery import salvage
from ucudnn.cache.hdf5.store import DeviceStore
from ucudnn.cache.table.checksum import checksums
from ucudnn.cache.table.table import Table
from ucudnn.system.files import is_temporary


@dataclass
class _Findings:
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)

    def report(self, sentence: str, severity: Severity) -> None:
        """Take a sentence from a store that changes nothing."""
        (self.notes if severity is Severity.NOTE else self.problems).append(sentence)

    def report_fixed(self, sentence: str, severity: Severity) -> None:
        """Take a sentence from a store that sets damaged files aside."""
        # The store that only reads comes after it, and reports everything that is still wrong.
        if severity is Severity.FIXED:
            self.fixed.append(sentence)


def check_folder(root: Path, use_locks: bool, fix: bool) -> CheckReport:
    """Check the folder of a cache.

    Args:
        root: the folder.
        use_locks: False: never try a file lock.
        fix: set damaged files aside, recover their sound entries, remove leftovers of writers.
    """
    findings = _Findings()
    records = files = 0
    for kind in kinds_in(root):
        of_kind = DeviceFiles(root, kind, use_locks)
        if fix:
            _fix(DeviceStore(of_kind, True, findings.report_fixed), findings)
        # A new store reads the files as the next process will find them.
        store = DeviceStore(of_kind, False, findings.report)
        table = store.table()
        _verify(kind, table, findings)
        records, files = records + len(table), files + len(of_kind.paths())
        findings.notes += [
            f"{file} holds something that only a later version understands"
            for file in store.partial_files()
        ]
        for path in of_kind.strays():
            damaged = is_set_aside(path.name)
            findings.notes.append(
                f"{path} "
                + ("is a damaged file, set aside" if damaged else "was left by a killed writer")
            )
    findings.notes += [
        f"{path} is not a file of this cache: it was left as it is" for path in foreign_in(root)
    ]
    return CheckReport(
        records, files, tuple(findings.problems), tuple(findings.notes), tuple(findings.fixed)
    )


def _verify(kind: str, table: Table, findings: _Findings) -> None:
    """Compare entries with their own checksums: sound files may hold what a faulty writer wrote."""
    wrong = np.count_nonzero(checksums(table) != table.rows["checksum"])
    if wrong:
        findings.problems.append(f"{kind}: {wrong} entries do not agree with their checksums")


def _fix(store: DeviceStore, findings: _Findings) -> None:
    store.refresh()
    for path in store.files.strays():
        if is_temporary(path.name):
            path.unlink(missing_ok=True)
            findings.fixed.append(f"{path} was left by a killed writer: removed")
            continue
        table = salvage(path)
        if table is not None:
            # Kept first, renamed then: a crash in between recovers them twice, which is harmless.
            store.put(table.entries())
            mark_salvaged(path)
            findings.fixed.append(f"{path}: {len(table)} sound entries were recovered")
