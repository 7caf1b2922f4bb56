"""Rooms of the cache: what each may import of the others, and who knows HDF5 and numpy."""

from __future__ import annotations

import ast
from pathlib import Path

INNER = {"entries", "table"}
ALLOWED = {
    "entries": set(),
    "table": {"entries"},
    "exchange": INNER,
    "explain": INNER,
    "summary": {"entries"},
    "base": INNER | {"exchange", "explain"},
    "overlay": {"base", "entries", "summary"},
    "wrapper": {"base", "entries"},
    "memory": {"base", "entries", "hdf5", "summary", "table"},
    "hdf5": INNER | {"base", "summary"},
}


def imported(path: Path) -> set[str]:
    """Modules that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules(package: Path) -> dict[str, set[str]]:
    """Imports by name of the module below `ucudnn.cache`, such as "hdf5.store"."""
    folder = package / "cache"
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts): imported(path)
        for path in sorted(folder.rglob("*.py"))
    }


def test_inner_rooms_do_not_know_the_outer_ones(package: Path) -> None:
    seen = set()
    for name, uses in modules(package).items():
        room = name.partition(".")[0]
        seen.add(room)
        if room not in ("__init__", "commands"):
            rooms = {use.split(".")[2] for use in uses if use.startswith("ucudnn.cache.")}
            assert rooms - {room} <= ALLOWED[room], name
    assert seen == {*ALLOWED, "__init__", "commands"}


def test_two_modules_know_hdf5_and_two_rooms_know_numpy(package: Path) -> None:
    uses_h5py = {name for name, uses in modules(package).items() if "h5py" in uses}
    assert uses_h5py == {"hdf5.codec", "hdf5.datasets"}
    for name, uses in modules(package).items():
        assert "numpy" not in uses or name.partition(".")[0] in ("hdf5", "table"), name
