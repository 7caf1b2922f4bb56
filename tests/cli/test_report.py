"""`ucudnn report`: what the page says and draws, read back by the standard library's parser."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import by_hand
import pytest

from ucudnn.cli import console
from ucudnn.config import Config
from ucudnn.kernels.noise import noise_of
from ucudnn.kernels.rationale import Alternative, Rationale, rationales
from ucudnn.measurement import Conditions, Device, Software
from ucudnn.outcomes import Origin, StepMemory, StepRace, Way
from ucudnn.plan import BY_BATCH, BY_SLABS, KernelPlan, Plan, Timing
from ucudnn.problem import Problem
from ucudnn.reports.cards import cards
from ucudnn.reports.html import report, write_report
from ucudnn.reports.text import kernel_table, plan_csv
from ucudnn.split import Chunk, Split

EVIL = "<script>alert(1)</script>"
# Clears a screen, sets a title, begins a sequence in 8 bits, deletes, shows text backwards.
CONTROLS = "\x1b[2J\x1b]0;title\x07\x9b31m\x7f\u202egnp"
MS = 1_000_000


class Page(HTMLParser):
    """What a browser would read: text by tag, the table, scripts, and what is loaded."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.scripts, self.loaded, self.texts, self.options = {}, [], [], [], []
        self._tags, self._rows = [], []
        self.feed(text)
        self.close()
        assert self._tags == [], "a tag is not closed"

    def handle_starttag(self, tag, attrs):
        if tag in ("meta", "input"):
            return
        self._tags.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href", "srcset")]
        if tag == "table":
            self._rows = self.tables.setdefault(dict(attrs).get("id"), [])
        if tag == "tr":
            self._rows.append([])
        if tag in ("td", "th"):
            self._rows[-1].append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self._tags.pop() == tag

    def handle_data(self, data):
        tag = self._tags[-1] if self._tags else ""
        if tag in ("td", "th") or "th" in self._tags[-2:]:
            self._rows[-1][-1] += data
        elif tag == "script":
            self.scripts[-1] += data
        elif tag == "option":
            self.options.append(data)
        elif tag in ("p", "li", "h1", "span", "b", "summary", "code"):
            self.texts.append(data)

    def cells(self, name):
        """The lines of a table, each with its cells by their headings."""
        head, *rows = self.tables[name]
        return [dict(zip(head, row, strict=True)) for row in rows]

    @property
    def text(self):
        return "\n".join(self.texts)

    @property
    def figures(self):
        """For each chart its figures (data, layout), of which the page draws one at a time."""
        (found,) = (script for script in self.scripts if script.startswith("{"))
        return json.loads(found)


def kernel(*, layers=("conv1",), algorithms=("torch_default", "onednn"), chunk=16, **fields):
    """A kernel of 32 samples and 10 rows, in chunks of one size by the last algorithm."""
    last = tuple((min(n, chunk), len(algorithms) - 1) for n in range(1, 33))
    values = {
        "problem": Problem("fprop", 32, 8, 16, (12, 12), (3, 3)),
        "layers": tuple(layers),
        "algorithms": tuple(algorithms),
        "alone": (BY_BATCH,) * 32,
        "last": last,
        "predicted_time_ns": 21 * MS,
        "timing": Timing(20 * MS, 1 * MS, 3 << 20, 7),
        "default": Timing(30 * MS, 2 * MS, 24 << 20, 9),
    }
    return KernelPlan(**{**values, **fields})


def plan_of(*kernels, **config):
    """A plan of a machine that does not exist; kernels differ in their channels."""
    numbered = tuple(
        replace(one, problem=replace(one.problem, out_channels=16 + index))
        for index, one in enumerate(kernels)
    )
    device = Device("cpu", "Example CPU", "AVX2", 4)
    software = Software("2.13.0", onednn="3.11")
    return Plan(numbered, device, software, Conditions(threads=3), Config(**config))


@pytest.fixture
def drawn():
    """A function that draws a plan and reads the page."""
    pytest.importorskip("plotly", reason="charts need plotly (the extra report)")
    return lambda plan: Page(report(plan))


@pytest.fixture
def mixed():
    """Split, by slabs, undivided default, predicted without a default."""
    rows = ((8, 1), (2, 0))
    default = Timing(7 * MS, 16 * MS, 0, 9)
    return plan_of(
        kernel(layers=("stem", "body.0", "body.1")),
        kernel(layers=("slabs",), alone=(BY_SLABS,) * 32, slabs=rows, notes=("a note",)),
        kernel(layers=("same",), alone=(0,) * 32, timing=default, default=default),
        kernel(layers=("guess",), timing=Timing(5 * MS, 0, 1 << 20, 0), default=None, chunk=8),
        workspace_limit="4MiB",
    )


def trace(figure, name):
    return next(one for one in figure[0] if one["name"] == name)


def marks(figure):
    """Times in s of all marks, by their series."""
    return {one["name"]: one["y"] for one in figure[0] if one["mode"] == "markers"}


@pytest.mark.slow
def test_the_heading_says_what_the_plan_was_made_for(drawn, mixed):
    page = drawn(mixed)
    said = "workspace limit 4 MiB, Example CPU, AVX2, 4 cores, 3 threads, torch 2.13.0"
    assert said in page.texts
    assert "3 of 4\nleave torch's own convolution" in page.text
    pool = drawn(plan_of(kernel(), total_workspace="64MiB"))
    assert "pool of 64 MiB, each call its own part" in pool.text


def test_the_table_has_every_kernel(drawn, mixed):
    page = drawn(mixed)
    cells = page.cells("kernels")
    assert page.tables["kernels"][0].count("workspace") == 2
    assert [row["#"] for row in cells] == ["0", "1", "2", "3"]
    assert [row["split"] for row in cells] == [
        "2x16 onednn",
        "slabs of 8 onednn + 2 torch_default",
        "32 torch_default",
        "4x8 onednn",
    ]
    assert [row["default"] for row in cells] == ["30.0 ms ±7%"] * 2 + ["7.00 ms ±229%", "-"]
    assert [row["plan"] for row in cells] == ["20.0 ms ±5%"] * 2 + ["= default", "~5.00 ms"]
    assert [row["layers"] for row in cells] == ["stem, body.0, body.1", "slabs", "same", "guess"]


def test_a_chart_has_the_time_of_each_way_to_run_a_step_over_its_peak(drawn, mixed):
    ways = (
        Way("torch", "torch", 90 << 20, 200 * MS),
        Way("segments", "micro-batches of 4", 31 << 20, 220 * MS, 30 << 20, 210 * MS),
        Way("segments", "stages in micro-batches of 8", 40 << 20, 205 * MS),
        Way("loop", "loop over 4", 25 << 20, 230 * MS, 26 << 20, 240 * MS),
    )
    memory = StepMemory(
        *(45 << 20, 1, 1, 1, 1, 80 << 20, 90 << 20, 44 << 20),
        ways=ways,
        torch_foreseen_ns=190 * MS,
        plan_ns=160 * MS,
    )
    race = StepRace(200 * MS, 150 * MS, 0.75, 0.7, 0.8, 5)
    page = drawn(replace(mixed, memory=memory, step_race=race))
    (figure,) = page.figures["ways"]
    drawn_at = {one["name"]: (one["x"], one["y"]) for one in figure[0]}
    assert drawn_at == {
        "torch, foreseen": ([90 << 20], [0.200]),
        "segments, foreseen": ([40 << 20], [0.205]),
        "segments": ([30 << 20], [0.210]),
        "loop": ([26 << 20], [0.240]),
        "plan": ([44 << 20], [0.150]),
        "budget 45 MiB": ([45 << 20] * 2, [0, 0.240]),
    }
    rows = [[*row.values()] for row in page.cells("ways-table")]
    assert rows == [
        ["torch", "90 MiB", "200 ms", "-", "-"],
        ["this plan", "-", "-", "44 MiB", "150 ms"],
        ["stages in micro-batches of 8", "40 MiB", "205 ms", "-", "-"],
        ["micro-batches of 4", "31 MiB", "220 ms", "30 MiB", "210 ms"],
        ["loop over 4", "25 MiB", "230 ms", "26 MiB", "240 ms"],
    ]
    # If torch's step does not fit, there is no race.
    unraced = drawn(replace(mixed, memory=memory))
    assert trace(unraced.figures["ways"][0], "plan")["y"] == [0.160]
    assert "~190 ms → 160 ms" in unraced.text
    assert "ways" not in drawn(mixed).figures


def test_plotly_knows_every_property(drawn, mixed):
    from plotly.graph_objects import Figure

    memory = StepMemory(9, 1, 1, 1, 1, 8, 9, 7, ways=(Way("torch", "torch", 9, 9),) * 2)
    figures = drawn(replace(mixed, memory=memory)).figures
    assert sorted(figures) == ["kernel", "ways"]
    for one in figures.values():
        for data, layout in one:
            Figure(data=data, layout=layout)  # raises ValueError with the name of an unknown one


def test_the_page_loads_nothing(drawn, mixed):
    page = drawn(mixed)
    assert page.loaded == []
    assert sum(len(script) > 1e6 for script in page.scripts) == 1
    # plotly's button that uploads a figure
    assert "showSendToCloud: false" in page.scripts[-1]


def test_names_are_text_not_markup(drawn):
    one = kernel(layers=(EVIL,), algorithms=(f"fft{EVIL}",), notes=(f"note {EVIL}",))
    text = report(plan_of(one))
    page = Page(text)
    assert EVIL not in text
    assert not [script for script in page.scripts if script == "alert(1)"]
    (cells,) = page.cells("kernels")
    assert cells["layers"] == EVIL
    assert cells["split"] == f"2x16 fft{EVIL}"
    # plotly reads some HTML in what it shows
    ((data, _),) = page.figures["kernel"]
    shown = [one["name"] for one in data] + [text for one in data for text in one["hovertext"]]
    assert any("&lt;script&gt;" in text for text in shown)
    assert not [text for text in shown if "<script" in text]


def test_control_characters_of_a_plan_file_reach_no_page_and_no_terminal(drawn, ucudnn, tmp_path):
    name = f"layer{CONTROLS}"
    hostile = plan_of(kernel(layers=(name,), algorithms=(f"fft{CONTROLS}",), notes=(name,)))
    hostile = replace(hostile, origin=Origin(model=name, inputs=(name,), made=name))
    hostile = replace(hostile, device=replace(hostile.device, name=name))
    hostile.save(tmp_path / "plan.json")
    assert drawn(hostile).cells("kernels")[0]["layers"] == (
        r"layer\x1b[2J\x1b]0;title\x07\x9b31m\x7f\u202egnp"
    )
    # plotly's own script has tabs and line ends
    assert not set(CONTROLS[:1] + "\x07\x9b\x7f\u202e") & set(report(hostile))
    for words in ([], ["--kernel", "0"], ["--csv"]):
        done = ucudnn("show", tmp_path / "plan.json", *words)
        assert done.status == 0, done.err
        assert r"\x1b" in done.out
        assert all(one.isprintable() or one == "\n" for one in done.out + done.err), words
    done = ucudnn("compare", tmp_path / "plan.json", tmp_path / "plan.json")
    assert all(one.isprintable() or one == "\n" for one in done.out + done.err)


def test_no_cell_of_the_csv_is_a_formula(mixed):
    for name in ('=HYPERLINK("http://x")', "+1", "-1", "@sum"):
        one = replace(mixed.kernels[0], layers=(name,))
        (row,) = csv.DictReader(plan_csv(replace(mixed, kernels=(one,))).splitlines())
        assert row["layers"] == f"'{name}"
        assert row["default_ns"] == "30000000"


@pytest.mark.parametrize("count", [0, 1, 200])
def test_any_number_of_kernels(drawn, count):
    plan = plan_of(*(kernel(layers=[f"layer{n}.conv", f"down{n}"]) for n in range(count)))
    text = report(plan)
    assert len(Page(text).tables.get("kernels", ["no head"])) == 1 + count
    assert ("The plan has no kernels." in text) == (count == 0)
    assert len(Page(text).options) == len(Page(text).figures.get("kernel", ())) == count
    assert len(text.encode()) < 6 << 20
    assert text == report(plan)


def test_show_begins_with_the_cards_and_folds_what_stays_torchs_own(
    ucudnn, mixed, tmp_path, monkeypatch
):
    plan, race = tmp_path / "plan.json", StepRace(200 * MS, 150 * MS, 0.75, 0.7, 0.8, 5)
    mixed = replace(mixed, step_race=race)
    mixed.save(plan)
    monkeypatch.setattr(console.out, "width", 80)
    shown, everything = (ucudnn("show", plan, *flag).out for flag in ((), ("--all",)))
    assert "workspace limit 4 MiB" in shown[: shown.index(" Step ")]
    # every total stands once, before everything else, and as on the page
    for card in cards(mixed):
        assert shown.count(card.value) == 1
        assert shown.index(card.value) < shown.index("Noise: ")
    assert "1 kernel stays torch's own; --all lists it" in shown
    assert "stay torch's own" not in everything
    for text, count in ((shown, 3), (everything, 4)):
        *_, table = text.partition("ratio  split")
        assert len(re.findall(r"^ {1,2}\d  fprop", table, re.M)) == count
        assert ("= default" in table) == (count == 4)
        assert all(len(line) <= 80 for line in table.splitlines())
    for one in mixed.kernels:
        # no split is hidden in a narrow terminal
        assert all(chunk.algorithm in everything for chunk in one.split(32).chunks)


def test_the_command_writes_the_page(drawn, mixed, ucudnn, tmp_path):
    mixed.save(tmp_path / "plan.json")
    path, cache = tmp_path / "report.html", tmp_path / "none"
    done = ucudnn("report", tmp_path / "plan.json", "-o", path, "--cache", cache)
    assert done.status == 0, done.err
    assert "Drew 4 kernels" in done.out
    # without a cache all that is known is in the plan
    assert path.read_text() == report(mixed, rationales(mixed, []))
    page = Page(path.read_text())
    assert f"Noise: {noise_of(mixed)}." in page.text
    assert "ucudnn report PLAN --cache FOLDER" in page.texts
    known = [Rationale(front=((0, 9 * MS),))] * 4
    assert "--cache FOLDER" not in Page(report(mixed, known)).text


def test_half_a_character_in_a_name_is_written(drawn, tmp_path):
    write_report(plan_of(kernel(layers=("\ud800",))), tmp_path / "report.html")
    assert "All kernels" in (tmp_path / "report.html").read_text()


def test_the_memory_that_a_budget_leaves_each_kernel(drawn):
    memory = StepMemory(80 << 20, 4 << 20, 0, 0, 1 << 20, 60 << 20, 90 << 20, 70 << 20)
    page = drawn(replace(plan_of(kernel(live_bytes=62 << 20)), memory=memory))
    # 80 MiB less what is live
    assert trace(page.figures["kernel"][0], "limit 18 MiB")["x"] == [18 << 20] * 2
    assert "memory budget 80 MiB" in page.text
    assert page.text.count("30 MiB of workspace") == 1
    assert "90 MiB → 70 MiB\n78% of torch's; budget 80 MiB" in page.text


def test_totals_stand_first(drawn, mixed):
    race = StepRace(200 * MS, 150 * MS, 0.75, 0.7, 0.8, 5)
    origin = Origin(model="net.py:net", inputs=("32x8x12x12 float32",), made="2026-01-31T12:00:00Z")
    text = drawn(replace(mixed, step_race=race, origin=origin)).text
    # three calls of the first kernel; the last one has no default to compare with
    wanted = ["net.py:net", "32x8x12x12 float32", "200 ms → 150 ms", "127 ms → 87.0 ms"]
    places = [text.index(part) for part in [*wanted, "24 MiB → 3 MiB", "3 of 4"]]
    assert places == sorted(places)
    assert "0.75 (0.70 to 0.80) times as long" in text
    assert "not judged by whole steps" in drawn(mixed).text


def test_the_front_of_a_kernel_with_what_was_rejected(drawn, mixed):
    rejected = (
        Alternative(
            Split("batch", (Chunk(32, "fast"),)),
            9 * MS,
            8 << 20,
            1e-7,
            False,
            "needs more than the limit of 4 MiB",
        ),
        Alternative(
            Split("batch", (Chunk(32, "slow"),)), 10**9, 0, None, True, "takes 50.00 times as long"
        ),
        Alternative(
            Split("batch", (Chunk(32, "broken"),)), None, None, None, False, "does not work"
        ),
    )
    first = Rationale(((0, 40 * MS), (2 << 20, 15 * MS)), rejected)
    page = Page(report(mixed, [first, *[Rationale()] * 3]))
    figure = page.figures["kernel"][0]
    front = trace(figure, "front, predicted")
    assert front["y"] == [0.040, 0.015, 0.015]
    assert front["x"][1] == 2 << 20
    # the plan's point, torch's, and what was not too slow to draw
    assert marks(figure) == {
        "rejected, predicted": [0.009],
        "rejected": [1.0],
        "torch's default": [0.030],
        "plan": [0.020],
    }
    symbols = {one["name"]: one["marker"].get("symbol") for one in figure[0] if "marker" in one}
    assert symbols["rejected, predicted"] == symbols["rejected"] + "-open"
    # three times torch's, and some room
    assert figure[1]["yaxis"]["range"][1] == pytest.approx(0.090 * 1.08)
    assert trace(figure, "rejected, predicted")["hovertext"] == [
        "<b>rejected</b>: 32 fast: needs more than the limit of 4 MiB<br>~9.00 ms in 8 MiB"
    ]
    # nothing is left of 0 B, which a logarithmic axis does not have
    axis = figure[1]["xaxis"]
    labels = dict(zip(axis["tickvals"], axis["ticktext"], strict=True))
    assert labels[front["x"][0]] == "0 B" == labels[min(labels)]
    assert trace(figure, "limit 4 MiB")["x"] == [4 << 20] * 2
    assert all(axis["range"][0] < math.log10(x) for one in figure[0] for x in one["x"])


def test_every_kernel_can_be_chosen(drawn, mixed):
    page = drawn(mixed)
    # by torch's time of all calls, the longest first, or by the plan's
    assert [label.split()[0] for label in page.options] == ["0", "1", "2", "3"]
    assert page.options[1] == "1  fprop conv2d(8->17, k3, 12x12) N=32"
    for figure, one in zip(page.figures["kernel"], mixed.kernels, strict=True):
        points = marks(figure)
        assert points.pop("torch's default", None) == (
            [one.default.time_ns / 1e9] if one.default else None
        )
        # a predicted time is never drawn as a measured one
        named = "plan, predicted" if one.timing.is_predicted else "plan"
        assert points == {named: [one.timing.time_ns / 1e9]}
        symbol = trace(figure, named)["marker"]["symbol"]
        assert symbol.endswith("-open") == one.timing.is_predicted


def test_batches_that_repeat_a_chunk_share_a_row():
    count, size = 256, 32
    every = range(1, count + 1)
    kernel = by_hand.kernel(
        9,
        batch=count,
        algorithms=("fast", "slow"),
        alone=tuple(1 if n < size else -1 for n in every),
        last=tuple((size, 0) if n >= size else (n, 1) for n in every),
    )
    rows = [*zip(*(column.cells for column in kernel_table(kernel).columns), strict=True)]
    assert rows == [
        ("1-31", "undivided slow", "derived"),
        ("32", "32 fast", "derived"),
        ("33-255", "chunks of 32 fast, the rest by slow", "derived"),
        ("256", "8x32 fast", "timed"),
    ]
