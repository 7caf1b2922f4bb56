"""Mutations of tables that people hand over: of measurements, of layers, of a probe."""

from __future__ import annotations

import copy
import csv
import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

from ucudnn import cache as caches
from ucudnn import testing
from ucudnn.cache import commands
from ucudnn.cache.exchange.probe import COLUMNS as PROBED
from ucudnn.cache.exchange.probe import read_probe
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
PROFILE = {
    "deviceName": "NVIDIA H200",
    "deviceVer": 900,
    "multiProcessorCount": 132,
    "totalGlobalMem": 150754820096,
}
PROBE_ROW = (
    *("net:conv1", "fprop", "fp32", "nchw", "64", "eng67_k2=20", "1048576", "A", "0"),
    *("TENSOR_CORE", "123.46", "120.00", "24", "3.1e-4", ""),
)


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
            cache.put(testing.sample_measurements(20, seed=5))
        commands.export(folder / "a.csv", folder / "sound")
        commands.export(folder / "a.json", folder / "sound")
        with (folder / "a.csv").open(newline="", encoding="utf-8", errors="surrogatepass") as file:
            self._rows = list(csv.reader(file))
        self._document = json.loads((folder / "a.json").read_text())

    def __call__(self, chance: random.Random) -> tuple[str, str]:
        name = chance.choice(("csv", "csv", "json", "json", "layers", "probe"))
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
        count = commands.import_(self._write(name, text), target)
        report = commands.check(target)
        assert report.clean, report
        assert bool(report.records) == bool(count)
        assert commands.info(target).records == report.records
        for again in ("again.csv", "again.json"):
            assert commands.export(self._folder / again, target) == report.records
            back = self._folder / f"back from {again}"
            shutil.rmtree(back, ignore_errors=True)
            assert commands.import_(self._folder / again, back) == report.records
        return count

    def _layers(self, chance: random.Random) -> int:
        rows = [list(COLUMNS), list(map(str, LAYER))]
        return len(read_layers(self._write("net.csv", mutated_rows(rows, chance))))

    def _probe(self, chance: random.Random) -> int:
        rows = [list(PROBED), list(PROBE_ROW)]
        which = chance.randrange(3)
        self._write("net.csv", f"{','.join(COLUMNS)}\n{','.join(map(str, LAYER))}\n")
        profile = mutated_values(PROFILE, chance) if which == 0 else PROFILE
        self._write("profile.json", json.dumps(profile))
        answers: dict[str, Any] = {"cudnn": 92800, "torch": "2.13.0"}
        self._write(
            "answers.json", json.dumps(mutated_values(answers, chance) if which == 1 else answers)
        )
        text = mutated_rows(rows, chance)
        if which != 2:
            text = f"{','.join(PROBED)}\n{','.join(PROBE_ROW)}\n"
        entries = read_probe(self._write("timings.csv", text), [self._folder / "net.csv"])
        target = self._folder / "probed"
        shutil.rmtree(target, ignore_errors=True)
        with caches.open(target) as cache:
            cache.put_entries(entries)
        assert commands.check(target).clean
        return len(entries)
