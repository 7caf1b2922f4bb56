"""Mutations of a cache's HDF5 file, of values and structure, behind a correct envelope."""

from __future__ import annotations

import io
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ucudnn import cache as caches
from ucudnn import testing
from ucudnn.cache import commands
from ucudnn.cache.hdf5.envelope import ENVELOPE_BYTES, wrap

MEASUREMENTS = testing.sample_measurements(16, seed=5)
EXTREMES = (
    *(0, 1, -1, 5, 127, 255, 2**15, 2**31 - 1, 2**32 - 1, 2**62 - 1, 2**62 + 1, 2**63 - 1),
    -(2**63),
)
SHAPES = ((), (), (), (2,), (3,), (3, 2))
WORDS = (b"", b"x", b"\xff\xfe", b"nhwc", b"wgrad", b"cpu", b"ok", b"failed", b"\0")
TEXTS = (
    *(b"", b"\xff\xfe", b"[", b'{"a":1}', b"[1,2]", b"null", b'"abc"', b"\xc0\x80", b"[[1]]"),
    *(b"x" * 100_000, b"[" * 3000 + b"]" * 3000, b'["\\ud800"]', b"../.."),
)
Tables = dict[str, Any]


def mutated_values(tables: Tables, chance: random.Random) -> None:
    """Change a cell, widen its column for it, or change a text."""
    name = chance.choice(list(tables))
    table = tables[name]
    if not len(table):
        return
    row = chance.randrange(len(table))
    if table.dtype.names is None:
        table[row] = chance.choice(TEXTS if table.dtype.kind == "O" else (0, 1, 5))
        return
    column = chance.choice(table.dtype.names)
    kind = table.dtype[column]
    if kind.base.kind in "iu":
        wide = chance.choice(("<i8", "<i8", "<i8", "<u8"))
        tables[name] = as_kinds(table, {column: (wide, kind.shape)})
        cells = tables[name][column][row : row + 1].reshape(-1)
        cells[chance.randrange(len(cells))] = np.array(chance.choice(EXTREMES)).astype(wide)
    elif kind.kind == "S":
        table[column][row] = chance.choice(WORDS)
    elif kind.kind == "f":
        table[column][row] = chance.choice((np.nan, np.inf, -1, 1e308))
    else:
        table[column][row] = not table[column][row]


def as_kinds(table: Any, kinds: dict[str, tuple[Any, ...]]) -> Any:
    """A table with some columns of other (type, shape), and zeros where values do not fit it."""
    old = {name: (table.dtype[name].base, table.dtype[name].shape) for name in table.dtype.names}
    changed = np.zeros(len(table), [(name, *kind) for name, kind in {**old, **kinds}.items()])
    for name, (kind, shape) in old.items():
        new = changed.dtype[name]
        fits = np.can_cast(kind, new.base, "same_kind") or kind.kind + new.base.kind == "iu"
        if new.shape == shape and fits:
            changed[name] = table[name].astype(new.base)
    return changed


def mutated_shape(tables: Tables, chance: random.Random) -> None:
    """Drop or double rows, drop a table, change a column's type, or add one."""
    name = chance.choice(list(tables))
    table = tables[name]
    columns = table.dtype.names
    match chance.randrange(5):
        case 0:
            tables[name] = table[: chance.randrange(len(table) + 1)]
        case 1:
            tables[name] = np.concatenate([table, table[: chance.randrange(len(table) + 1)]])
        case 2 if columns:
            kind = chance.choice(("f4", "S3", "S40", "?", "<u8", "i1", "<i8"))
            tables[name] = as_kinds(table, {chance.choice(columns): (kind, chance.choice(SHAPES))})
        case 3 if columns:
            added = chance.choice((("<i8", (2,)), ("S4", ()), ("?", ())))
            tables[name] = as_kinds(table, {"conditions.later": added})
        case _:
            del tables[name]


def claim(file: h5py.File, chance: random.Random) -> None:
    """Let a dataset, also one that nobody knows, claim what is not in the file."""
    name = chance.choice([*file, "unknown"])
    kind = file[name].dtype if name in file else np.dtype("i8")
    file.pop(name, None)
    rows = chance.choice((1, 10**3, 10**7, 10**9, 10**12))
    chunk = (min(rows, chance.choice((1, 1 << 10, 1 << 16))),)
    match chance.randrange(7):
        case 0:
            file.create_dataset(name, (rows,), kind, chunks=chunk, compression="gzip")
        case 1:
            file.create_dataset(name, (rows,), kind)
        case 2:
            file.create_dataset(name, (64,), "i1", external=[("/dev/zero", 0, 64)])
        case 3:
            file[name] = h5py.ExternalLink("/dev/null", "x")
        case 4:
            file[name] = h5py.SoftLink("/samples")
        case 5:
            file.create_group(name)
        case _:
            # compresses a thousandfold, and once more
            content = np.zeros(10**6, "i8")
            file.create_dataset(name, data=content, chunks=(10**6,), compression="gzip")


class Trials:
    """Puts a mutated file beside a sound one and uses the cache in some of all ways."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with caches.open(folder / "sound") as cache:
            cache.put(MEASUREMENTS)
        self._files = sorted((folder / "sound").glob("*.h5"))
        self._tables = [self._read(path) for path in self._files]
        self._uses: tuple[Callable[[Path, random.Random], object], ...] = (
            lambda root, _: commands.check(root),
            lambda root, _: commands.info(root),
            lambda root, _: commands.export(folder / "out.json", root),
            lambda root, _: commands.export(folder / "out.csv", root),
            lambda root, _: commands.explain(["problem.batch=3"], root),
            lambda root, _: commands.prune(root, ["status=failed"]),
            self._get,
            self._put,
            self._merge,
        )

    @staticmethod
    def _read(path: Path) -> Tables:
        with h5py.File(io.BytesIO(path.read_bytes()[ENVELOPE_BYTES:]), "r") as file:
            return {name: file[name][()] for name in file}

    def __call__(self, chance: random.Random) -> tuple[str, str]:
        root = self._folder / "cache"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        for path in self._files:
            shutil.copy(path, root)
        which = chance.randrange(len(self._files))
        kind = self._mutate(root / self._files[which].name, self._tables[which], chance)
        own = root / "train.h5"
        own.write_bytes(b"\x89HDF\r\n\x1a\nmy own")
        records = commands.info(root).records
        assert records <= 2 * len(MEASUREMENTS)
        for use in chance.sample(self._uses, 2):
            use(root, chance)
        if chance.random() < 0.01:
            commands.check(root, fix=True)
        assert own.read_bytes() == b"\x89HDF\r\n\x1a\nmy own"
        return f"{kind}: {'all' if records >= len(MEASUREMENTS) else 'partly'} read", ""

    def _mutate(self, path: Path, tables: Tables, chance: random.Random) -> str:
        changed = {name: table.copy() for name, table in tables.items()}
        kind = chance.choice(("values", "values", "shape", "claim"))
        for _ in range(chance.choice((1, 1, 2)) if kind != "claim" else 0):
            if changed:
                (mutated_values if kind == "values" else mutated_shape)(changed, chance)
        image = io.BytesIO()
        with h5py.File(image, "w") as file:
            for name, table in changed.items():
                kind_of_texts = h5py.string_dtype() if table.dtype.kind == "O" else None
                file.create_dataset(name, data=table, dtype=kind_of_texts)
            if kind == "claim":
                claim(file, chance)
        path.write_bytes(wrap(image.getvalue()))
        return kind

    @staticmethod
    def _get(root: Path, _: random.Random) -> None:
        with caches.open(root, "r") as cache:
            for one in MEASUREMENTS:
                cache.get(one.key)

    @staticmethod
    def _put(root: Path, chance: random.Random) -> None:
        put = testing.sample_measurements(5, seed=chance.randrange(99))
        with caches.open(root) as cache:
            cache.put(put)
            found = [cache.get(one.key) for one in put]
            assert [repr(one) for one in found] == [repr(one) for one in put]

    def _merge(self, root: Path, _: random.Random) -> None:
        target = self._folder / "merged"
        try:
            commands.merge([root], target)
            assert commands.check(target).clean or commands.check(root).problems
        finally:
            shutil.rmtree(target, ignore_errors=True)
