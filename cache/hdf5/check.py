"""Check every file of a cache."""

from __future__ import annotations

from pathlib import Path

from ucudnn.cache.entries import CheckReport
from ucudnn.cache.hdf5.files import DeviceFiles, foreign_in, is_set_aside, kinds_in
from ucudnn.cache.hdf5.store import DeviceStore


def check_folder(root: Path) -> CheckReport:
    """Read every file in the folder of a cache, and change nothing."""
    problems: list[str] = []
    notes = []
    records = files = 0
    for kind in kinds_in(root):
        of_kind = DeviceFiles(root, kind, use_locks=False)
        # A new store reads the files as the next process will find them.
        table = DeviceStore(of_kind, False, problems.append).table()
        records, files = records + len(table), files + len(of_kind.paths())
        for path in of_kind.strays():
            what = "was set aside" if is_set_aside(path.name) else "was left by a killed writer"
            notes.append(f"{path} {what}; nothing needs it")
    notes += [
        f"{path} is not a file of this cache: it was left as it is" for path in foreign_in(root)
    ]
    return CheckReport(records, files, tuple(problems), tuple(notes))
