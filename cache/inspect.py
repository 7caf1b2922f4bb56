"""Look at every file of a cache, and put right what can be."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ucudnn.cache.folder import is_set_aside, is_temporary, kinds_in, mark_salvaged, names_in
from ucudnn.cache.salvage import salvage
from ucudnn.cache.shelf import Shelf
from ucudnn.cache.tabulate import checksums
from ucudnn.cache.values import CheckReport
from ucudnn.errors import UcudnnError

_LEFTOVER_AGE_S = 3600.0


@dataclass
class _Findings:
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)


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
        said = findings.fixed if fix else findings.problems
        shelf = Shelf(root, kind, fix, use_locks, said.append)
        shelf.refresh()
        _inspect_strays(shelf, findings, fix)
        table = shelf.table()
        records, files = records + len(table), files + len(shelf.files)
        findings.notes += [
            f"{file} holds something that only a later version understands"
            for file in shelf.incomplete_files
        ]
        try:
            wrong = np.count_nonzero(checksums(table) != table.rows["checksum"])
            if wrong:
                findings.problems.append(f"{kind}: {wrong} entries do not agree with their sums")
        except UcudnnError as error:
            findings.problems.append(f"{kind}: an entry is impossible ({error})")
    return CheckReport(records, files, *map(tuple, vars(findings).values()))


def _inspect_strays(shelf: Shelf, findings: _Findings, fix: bool) -> None:
    """What stands beside the files of a shelf: damaged files set aside, leftovers of writers."""
    for folder, prefix in ((shelf.compacted.parent, shelf.compacted.name), (shelf.segments, "")):
        for name in names_in(folder):
            path = folder / name
            if name.startswith(prefix) and is_set_aside(name):
                _inspect_damaged(path, shelf, findings, fix)
            elif is_temporary(name) and _age_s(path) > _LEFTOVER_AGE_S:
                if fix:
                    path.unlink(missing_ok=True)
                (findings.fixed if fix else findings.notes).append(
                    f"{path} was left by a writer that was killed" + (": removed" if fix else "")
                )


def _inspect_damaged(path: Path, shelf: Shelf, findings: _Findings, fix: bool) -> None:
    table = salvage(path) if fix else None
    if table is None:
        findings.notes.append(f"{path} is a damaged file that was set aside")
        return
    if len(table):
        shelf.put(table.entries())
    mark_salvaged(path)
    findings.fixed.append(f"{path}: {len(table)} sound entries were recovered")


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
