"""Look at every file of a cache, and put right what can be."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ucudnn.cache.entries import CheckReport
from ucudnn.cache.hdf5.files import (
    foreign_in,
    is_set_aside,
    kinds_in,
    mark_salvaged,
    names_in,
)
from ucudnn.cache.hdf5.reader import Severity
from ucudnn.cache.hdf5.recovery import salvage
from ucudnn.cache.hdf5.store import Shelf
from ucudnn.cache.table.builder import checksums
from ucudnn.cache.table.table import Table
from ucudnn.errors import UcudnnError
from ucudnn.system.files import is_temporary

_LEFTOVER_AGE_S = 3600.0


@dataclass
class _Findings:
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)

    def say(self, sentence: str, severity: Severity) -> None:
        """Take a sentence from a look that changes nothing."""
        (self.notes if severity is Severity.NOTE else self.problems).append(sentence)

    def say_fixed(self, sentence: str, severity: Severity) -> None:
        """Take a sentence from a shelf that sets damaged files aside; a look says the others."""
        if severity is Severity.FIXED:
            self.fixed.append(sentence)


def inspect(root: Path, use_locks: bool, fix: bool) -> CheckReport:
    """Check the folder of a cache.

    Args:
        root: the folder.
        use_locks: whether to try file locks.
        fix: set damaged files aside, recover their sound entries, remove what killed writers left.
    """
    findings = _Findings()
    records = files = 0
    for kind in kinds_in(root):
        if fix:
            _fix(Shelf(root, kind, True, use_locks, findings.say_fixed), findings)
        shelf = Shelf(root, kind, False, use_locks, findings.say)
        table = shelf.table()
        _verify(kind, table, findings)
        records, files = records + len(table), files + len(shelf.files)
        findings.notes += [
            f"{file} holds something that only a later version understands"
            for file in shelf.partial_files
        ]
        for path in _strays(shelf):
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
    try:
        wrong = np.count_nonzero(checksums(table) != table.rows["checksum"])
    except UcudnnError as error:
        findings.problems.append(f"{kind}: an entry is impossible ({error})")
        return
    if wrong:
        findings.problems.append(f"{kind}: {wrong} entries do not agree with their checksums")


def _strays(shelf: Shelf) -> list[Path]:
    """Other files beside those of a shelf: damaged ones set aside, leftovers of writers."""
    root, segments = shelf.compacted.parent, shelf.segments
    beside = [root / name for name in names_in(root) if name.startswith(shelf.compacted.name)]
    inside = [segments / name for name in names_in(segments)]
    return [
        path
        for path in (*beside, *inside)
        if is_set_aside(path.name) or (is_temporary(path.name) and _age_s(path) > _LEFTOVER_AGE_S)
    ]


def _fix(shelf: Shelf, findings: _Findings) -> None:
    shelf.refresh()
    for path in _strays(shelf):
        if is_temporary(path.name):
            path.unlink(missing_ok=True)
            findings.fixed.append(f"{path} was left by a killed writer: removed")
            continue
        table = salvage(path)
        if table is not None:
            shelf.put(table.entries())
            mark_salvaged(path)
            findings.fixed.append(f"{path}: {len(table)} sound entries were recovered")


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
