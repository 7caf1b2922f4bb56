"""Mutations of tables that people hand over: of measurements and of layers."""

from __future__ import annotations

import copy
import csv
import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import laws

from ucudnn import cache as caches
from ucudnn.errors import UcudnnError
from ucudnn.layer_table import COLUMNS, read_layers

CELLS = (
    *("9" * 5000, "9" * 400, str(2**63), str(-(2**63)), str(2**63 - 1), "1e400", "nan", "inf"),
    *("-inf", "-1", "0", "0x10", "1_000", "\u0663", "[[[[", "[" * 5000 + "]" * 5000, '["a",1]'),
    *('["\\ud800"]', "\x00", "\ud800", "x" * 200_000, "1x1x1x1", "1x", "1:1", "1:2:3", "true"),
    *("ok", "failed", "", "../../x", "=cmd()", "-0", " 1", "1.0", "{}", "null", '"', "\n"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, -5, 2**62, 2**62 + 1, 2**63, -(2**63), 10**400, 1.5, -1.0, 1e308),
    *(float("nan"), float("inf"), "x", "", "ok", "nan", "1e5", "\ud800", "\x00", "../../x", "cpu"),
    *("x" * 100_000, [], [1], [[1, 1]], [[1]], [1, [2]], {}, {"a": 1}, ["a"], [None], [1] * 1000),
)
LAYER = ("conv1", 256, 3, 1, 227, 227, 96, 1, 11, 11, 0, 0, 0, 1, 4, 4, 1, 1, 1, 1)


def mutated_rows(rows: list[list[str]], chance: random.Random) -> str:
    """A CSV with some cells replaced, a column renamed, or a row too long."""
    header, *body = copy.deepcopy(rows)
    for _ in range(chance.choice((1, 1, 2))):
        match chance.randrange(6):
            case 0:
                names = ("status", "problem.op", "x", "problem.z", "", "name")
                header[chance.randrange(len(header))] = chance.choice(names)
            case 1:
                chance.choice(body).append("x")
            case _:
                chance.choice(body)[chance.randrange(len(header))] = chance.choice(CELLS)
    stream = io.StringIO(newline="")
    csv.writer(stream).writerows([header, *body])
    text = stream.getvalue()
    if chance.random() < 0.1:
        place = chance.randrange(len(text))
        text = text[:place] + chance.choice(('"', "\x00", "\r", ",")) + text[place:]
    return text


def mutated_values(values: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A JSON object with some values replaced, dropped or added."""
    changed = dict(values)
    for _ in range(chance.choice((1, 1, 2))):
        name = chance.choice(list(changed))
        match chance.randrange(5):
            case 0:
                del changed[name]
            case 1:
                added = chance.choice(("extra", "problem.extra", "x.y.z", "device.", " status"))
                changed[added] = chance.choice(VALUES)
            case _:
                changed[name] = copy.deepcopy(chance.choice(VALUES))
    return changed


class Trials:
    """Imports a mutated table; what is taken must be found sound and be given back."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with caches.open(folder / "sound") as cache:
            cache.put(laws.sample_measurements(20, seed=5))
            cache.export(folder / "a.csv")
            cache.export(folder / "a.json")
        with (folder / "a.csv").open(newline="", encoding="utf-8", errors="surrogatepass") as file:
            self._rows = list(csv.reader(file))
        self._document = json.loads((folder / "a.json").read_text())

    def __call__(self, chance: random.Random) -> tuple[str, str]:
        name = chance.choice(("csv", "csv", "json", "json", "layers"))
        try:
            count = getattr(self, f"_{name}")(chance)
        except UcudnnError as error:
            return f"{name} refused", str(error)
        return f"{name} taken{'' if count else ', empty'}", ""

    def _csv(self, chance: random.Random) -> int:
        rows = [self._rows[0], *chance.sample(self._rows[1:], 2)]
        return self._import("b.csv", mutated_rows(rows, chance))

    def _json(self, chance: random.Random) -> int:
        records = chance.sample(self._document["measurements"], 2)
        records[0] = mutated_values(records[0], chance)
        document = {**self._document, "measurements": records}
        if chance.random() < 0.1:
            document = mutated_values(document, chance)
        text = json.dumps(document)
        if chance.random() < 0.1:
            deep = chance.choice((40, 900, 100_000))
            text = text.replace("[]", "[" * deep + "]" * deep)
        return self._import("b.json", text)

    def _write(self, name: str, text: str) -> Path:
        path = self._folder / name
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return path

    def _import(self, name: str, text: str) -> int:
        target = self._folder / "target"
        shutil.rmtree(target, ignore_errors=True)
        with caches.open(target) as cache:
            count = cache.import_(self._write(name, text))
        with caches.open(target) as cache:
            report = cache.check()
            assert report.clean, report
            assert bool(report.records) == bool(count)
            assert cache.info().records == report.records
            for again in ("again.csv", "again.json"):
                assert cache.export(self._folder / again) == report.records
                with caches.MemoryCache() as back:
                    assert back.import_(self._folder / again) == report.records
        return count

    def _layers(self, chance: random.Random) -> int:
        rows = [list(COLUMNS), list(map(str, LAYER))]
        return len(read_layers(self._write("net.csv", mutated_rows(rows, chance))))
