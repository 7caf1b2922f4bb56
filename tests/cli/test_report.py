"""`ucudnn report`: what the page says and draws, read back by the standard library's parser."""

from __future__ import annotations

import csv
import json
import math
import random
from dataclasses import replace
from html.parser import HTMLParser

import by_hand
import pytest

from ucudnn.config import Config
from ucudnn.kernels.noise import noise_of
from ucudnn.kernels.rationale import Alternative, Rationale, rationales
from ucudnn.measurement import Conditions, Device, Software
from ucudnn.outcomes import LayoutRace, Origin, StepMemory, StepRace, Way
from ucudnn.plan import BY_BATCH, BY_SLABS, KernelPlan, Plan, Timing
from ucudnn.problem import Problem
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
        self.tables, self._facts, self.scripts, self.loaded, self.texts = {}, [], [], [], []
        self._tags, self._rows, self.links, self.ids = [], [], [], []
        self.feed(text)
        self.close()
        assert self._tags == [], "a tag is not closed"

    def handle_starttag(self, tag, attrs):
        if tag in ("meta", "input"):
            return
        self._tags.append(tag)
        links = [value for name, value in attrs if name in ("src", "href", "srcset")]
        # Links that begin so lead to a part of the page.
        self.loaded += [link for link in links if not link.startswith("#")]
        self.links += links
        self.ids += [value for name, value in attrs if name == "id"]
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
        elif tag in ("dt", "dd"):
            self._facts.append(data)
        elif tag in ("p", "li", "h1", "span", "b", "summary"):
            self.texts.append(data)

    def cells(self, name):
        """The lines of a table, each with its cells by their headings."""
        head, *rows = self.tables[name]
        return [dict(zip(head, row, strict=True)) for row in rows]

    @property
    def facts(self):
        return dict(zip(self._facts[::2], self._facts[1::2], strict=True))

    @property
    def text(self):
        return "\n".join(self.texts)

    @property
    def figures(self):
        """Data, layout and settings of each figure, as its call of plotly has them."""
        found = {}
        for script in self.scripts:
            # plotly's own text names the function, too, but draws nothing
            start = script.find("Plotly.newPlot(", 0, 2000)
            if start >= 0:
                rest = script[start + len("Plotly.newPlot(") :]
                values = []
                while len(values) < 4:
                    value, end = json.JSONDecoder().raw_decode(rest.lstrip(", \n"))
                    rest = rest.lstrip(", \n")[end:]
                    values.append(value)
                found[values[0]] = values[1:]
        return found


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


@pytest.mark.slow
def test_the_heading_says_what_the_plan_was_made_for(drawn, mixed):
    page = drawn(mixed)
    assert page.facts == {
        "device": "Example CPU, AVX2, 4 cores",
        "threads": "3",
        "torch": "2.13.0",
        "onednn": "3.11",
        "backend": "torch_cpu",
        "workspace limit": "4 MiB for each kernel",
        "policy": "powers-of-two",
        "ops": "fprop, dgrad, wgrad",
        "plan": mixed.hash,
    }
    assert "3 of 4 kernels leave torch's default" in page.text
    pool = drawn(plan_of(kernel(), total_workspace="64MiB"))
    assert "64 MiB, every call owns its part" in pool.facts.values()


def test_the_table_has_every_kernel_with_notes(drawn, mixed):
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
    assert "a note (kernel 1)" in page.texts


def test_the_first_chart_has_the_time_of_each_way_to_run_a_step_over_its_peak(drawn, mixed):
    ways = (
        Way("torch", "torch", 90 << 20, 200 * MS),
        Way("segments", "micro-batches of 4", 31 << 20, 220 * MS, 30 << 20, 210 * MS),
        Way("segments", "stages in micro-batches of 8", 40 << 20, 205 * MS),
        Way("loop", "loop over 4", 25 << 20, 230 * MS, 26 << 20, 240 * MS),
    )
    memory = StepMemory(
        *(45 << 20, 1, 1, 1, 1, 80 << 20, 90 << 20, 44 << 20), ways=ways, plan_ns=160 * MS
    )
    race = StepRace(200 * MS, 150 * MS, 0.75, 0.7, 0.8, 5)
    page = drawn(replace(mixed, memory=memory, step_race=race))
    assert next(iter(page.figures)) == "Memory and time"
    marks = {
        name: (one["x"], one["y"])
        for one in page.figures["Memory and time"][0]
        if "budget" not in (name := one["name"])
    }
    assert marks == {
        "torch, foreseen": ([90 << 20], [0.200]),
        "segments, foreseen": ([40 << 20], [0.205]),
        "segments": ([30 << 20], [0.210]),
        "loop": ([26 << 20], [0.240]),
        "plan": ([44 << 20], [0.150]),
    }
    # If torch's step does not fit, there is no race.
    unraced = drawn(replace(mixed, memory=memory)).figures["Memory and time"][0]
    assert [one["y"] for one in unraced if one["name"] == "plan"] == [[0.160]]
    assert "Memory and time" not in drawn(mixed).figures


def test_times_are_those_of_all_calls_with_their_spread(drawn, mixed):
    figure = drawn(mixed).figures["Times"]
    default = trace(figure, "torch's default, measured")
    # sorted by the default's time; the first kernel runs three times
    assert default["y"] == [0, 1, 2]
    assert default["x"] == [0.090, 0.030, 0.007]
    # half the interquartile range, and no time is below zero
    assert default["error_x"]["array"] == [0.003, 0.001, 0.008]
    assert default["error_x"]["arrayminus"] == [0.003, 0.001, 0.007]
    assert "interquartile range 2.00 ms, 9 samples" in default["hovertext"][0]
    plan = trace(figure, "plan, measured")
    assert (plan["y"], plan["x"]) == ([0, 1, 2], [0.060, 0.020, 0.007])
    assert plan["text"] == ["60.0 ms", "20.0 ms", "7.00 ms"]
    assert "predicted sum of the parts over measured: 1.05" in plan["hovertext"][0]
    assert "calls: 3 (stem, body.0, body.1)" in plan["hovertext"][0]
    assert "split: 2x16 onednn" in plan["hovertext"][0]
    names = figure[1]["yaxis"]["ticktext"]
    assert [name.split()[0] for name in names] == ["0", "1", "2", "3"]
    assert "8-&gt;16" in names[0]


@pytest.mark.parametrize("chart", ["Times", "Workspaces"])
def test_a_predicted_time_is_never_drawn_as_a_measured_one(drawn, mixed, chart):
    figure = drawn(mixed).figures[chart]
    predicted = trace(figure, "plan, predicted")
    assert predicted["y"] == [3]
    assert "~5.00 ms a call, predicted" in predicted["hovertext"][0]
    assert "error_x" not in predicted
    assert all(3 not in one["y"] for one in figure[0] if "measured" in one["name"])
    if chart == "Times":
        assert predicted["text"] == ["~5.00 ms predicted"]
        assert predicted["marker"]["pattern"]["shape"] == "/"
    else:
        assert predicted["marker"]["symbol"].endswith("-open")


def test_workspaces_and_the_limit(drawn, mixed):
    figure = drawn(mixed).figures["Workspaces"]
    traces, layout, _ = figure
    left, right = layout["xaxis"]["range"]
    default = trace(figure, "torch's default, measured")["x"]
    assert default[:2] == [24 << 20, 24 << 20]
    # nothing is left of 0 B, which a logarithmic axis does not have
    labels = dict(zip(layout["xaxis"]["tickvals"], layout["xaxis"]["ticktext"], strict=True))
    assert labels[default[2]] == "0 B" == labels[min(labels)]
    limit = trace(figure, "workspace limit 4 MiB")
    assert limit["x"] == [4 << 20] * 2
    assert all(left < math.log10(x) < right for one in traces for x in one["x"])
    free = drawn(plan_of(kernel())).figures["Workspaces"]
    assert not [one for one in free[0] if "limit" in one["name"]]


def test_splits_are_drawn_chunk_by_chunk(drawn, mixed):
    figure = drawn(mixed).figures["Splits"]
    assert pieces(figure, 0) == [(0, 0.5, "16", "onednn"), (0.5, 0.5, "16", "onednn")]
    assert pieces(figure, 1) == [(0, 0.8, "8", "onednn"), (0.8, 0.2, "2", "torch_default")]
    # not the third kernel, which is torch's own
    assert [size for _, _, size, _ in pieces(figure, 2)] == ["8"] * 4
    assert len(figure[1]["yaxis"]["ticktext"]) == 3
    assert "Not drawn: 1 other kernel by torch's own convolution" in drawn(mixed).text
    plain = drawn(replace(mixed, kernels=mixed.kernels[2:3]))
    assert "Splits" not in plain.figures
    assert "All kernels are torch's own convolutions, undivided." in plain.text
    assert figure[1]["yaxis"]["ticktext"][1].endswith("slabs")
    assert "8 of 10 rows" in trace(figure, "onednn")["customdata"]
    # else each algorithm's bars would be as wide as its rows are apart
    assert {one["width"] for one in figure[0]} == {0.8}
    many = drawn(plan_of(kernel(chunk=1))).figures["Splits"]
    assert pieces(many, 0) == [(0, 1, "32x1", "onednn")]
    one = kernel(chunk=1)
    mended = replace(one, last=(*one.last[:-1], (15, 0)))
    assert pieces(drawn(plan_of(mended)).figures["Splits"], 0) == [
        (0, 0.53125, "17x1", "onednn"),
        (0.53125, 0.46875, "15", "torch_default"),
    ]


def pieces(figure, place):
    """Begin, width, size and algorithm of the segments of one row, from the left."""
    return sorted(
        (base, x, size, one["name"])
        for one in figure[0]
        for y, base, x, size in zip(one["y"], one["base"], one["x"], one["text"], strict=True)
        if y == place
    )


def test_any_plan_is_drawn_as_it_splits(drawn, random_plan):
    torch = pytest.importorskip("torch", reason="traces a model")
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 3, stride=2))
    for seed in range(5):
        plan = random_plan(model, torch.randn(5, 3, 9, 9), random.Random(seed))
        figure = drawn(plan).figures.get("Splits")
        shown = [] if figure is None else figure[1]["yaxis"]["ticktext"]
        own = [one for one in plan.kernels if one.split(one.problem.batch).is_default]
        assert len(shown) + len(own) == len(plan.kernels)
        for place, label in enumerate(shown):
            one = plan.kernels[int(label.split()[0])]
            chunks = one.split(one.problem.batch).chunks
            expected = [(str(chunk.size), chunk.algorithm) for chunk in chunks]
            assert [piece[2:] for piece in pieces(figure, place)] == expected


def test_plotly_knows_every_property(drawn, mixed):
    from plotly.graph_objects import Figure

    for data, layout, _ in drawn(mixed).figures.values():
        Figure(data=data, layout=layout)  # raises ValueError with the name of an unknown one


def test_the_page_loads_nothing(drawn, mixed):
    page = drawn(mixed)
    assert page.loaded == []
    assert sum(len(script) > 1e6 for script in page.scripts) == 1
    # plotly's own text, a call of it for each figure, and its setting
    assert all("Plotly" in script for script in page.scripts)
    for _, _, settings in page.figures.values():
        # plotly's button that uploads a figure
        assert settings["showSendToCloud"] is False


def test_links_lead_to_the_sections(drawn, mixed):
    page = drawn(mixed)
    assert [link[1:] for link in page.links] == [name for name in page.ids if name[:3] == "to-"]
    assert {"#to-times", "#to-why-these-splits", "#to-all-kernels"} < set(page.links)
    assert len(set(page.ids)) == len(page.ids)


def test_names_are_text_not_markup(drawn):
    one = kernel(layers=(EVIL,), algorithms=(f"fft{EVIL}",), notes=(f"note {EVIL}",))
    text = report(plan_of(one))
    page = Page(text)
    assert EVIL not in text
    assert not [script for script in page.scripts if script == "alert(1)"]
    (cells,) = page.cells("kernels")
    assert cells["layers"] == EVIL
    assert cells["split"] == f"2x16 fft{EVIL}"
    assert f"note {EVIL} (kernel 0)" in page.texts
    # plotly reads some HTML in what it shows
    for data, layout, _ in page.figures.values():
        shown = [layout["yaxis"].get("ticktext", []), *(one.get("hovertext", []) for one in data)]
        shown.append([one["name"] for one in data])
        assert not [text for texts in shown for text in texts if "<script" in text]


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
    assert len(Page(text).tables["kernels"]) == 1 + count
    assert len(Page(text).figures) == (4 if count else 0)
    assert len(text.encode()) < 6 << 20
    assert text == report(plan)


def test_the_command_writes_the_page(drawn, mixed, ucudnn, tmp_path):
    mixed.save(tmp_path / "plan.json")
    path, cache = tmp_path / "report.html", tmp_path / "none"
    done = ucudnn("report", tmp_path / "plan.json", "-o", path, "--cache", cache)
    assert done.status == 0, done.err
    assert "Drew 4 kernels" in done.out
    # without a cache all that is known is in the plan
    assert path.read_text() == report(mixed, rationales(mixed, []))
    assert f"Noise: {noise_of(mixed)}." in Page(path.read_text()).text


def test_half_a_character_in_a_name_is_written(drawn, tmp_path):
    write_report(plan_of(kernel(layers=("\ud800",))), tmp_path / "report.html")
    assert "All kernels" in (tmp_path / "report.html").read_text()


def test_the_memory_that_a_budget_leaves_each_kernel(drawn):
    memory = StepMemory(80 << 20, 4 << 20, 0, 0, 1 << 20, 60 << 20, 90 << 20, 70 << 20)
    page = drawn(replace(plan_of(kernel(live_bytes=62 << 20)), memory=memory))
    # 80 MiB less what is live
    left = trace(page.figures["Workspaces"], "left by the memory budget")
    assert (left["x"], left["y"]) == ([18 << 20], [0])
    assert page.facts["memory budget"] == "80 MiB"
    assert page.text.count("30 MiB of workspace") == 1


def test_totals_stand_first(drawn, mixed):
    race = StepRace(200 * MS, 150 * MS, 0.75, 0.7, 0.8, 5)
    origin = Origin(model="net.py:net", inputs=("32x8x12x12 float32",), made="2026-01-31T12:00:00Z")
    text = drawn(replace(mixed, step_race=race, origin=origin)).text
    # three calls of the first kernel; the last one has no default to compare with
    wanted = ["net.py:net", "32x8x12x12 float32", "200 ms → 150 ms", "127 ms → 87.0 ms"]
    places = [text.index(part) for part in [*wanted, "24 MiB → 3 MiB", "3 of 4"]]
    assert places == sorted(places)
    assert "0.75 times as long (0.70 to 0.80)" in text
    assert "not raced in whole steps" in drawn(mixed).text


def test_what_a_plan_lacks_is_said_with_the_way_to_get_it(drawn, mixed):
    lacking = drawn(mixed).text
    memory = StepMemory(80 << 20, 0, 0, 0, 0, 60 << 20, 90 << 20, 70 << 20, calls=((1, 9 << 20),))
    full = replace(
        mixed,
        memory=memory,
        layout_race=LayoutRace(reason="it has no tensors of four or five axes"),
    )
    known = [Rationale(front=((0, 9 * MS),))] * 4
    complete = Page(report(full, known)).text
    for remedy in ("--memory-budget 8GiB", "--layout auto", "--cache FOLDER"):
        assert remedy in lacking
        assert remedy not in complete


def test_the_timeline_has_each_call_with_its_memory(drawn):
    wide = kernel(problem=Problem("wgrad", 32, 8, 16, (12, 12), (3, 3)))
    # a plan file may name a kernel that it does not have
    calls = ((1, 7 << 20), (0, 9 << 20), (1, 8 << 20), (5, 1))
    memory = StepMemory(80 << 20, 0, 0, 0, 0, 60 << 20, 90 << 20, 70 << 20, calls=calls)
    figure = drawn(replace(plan_of(kernel(), wide), memory=memory)).figures["Timeline"]
    live = trace(figure, "live")
    assert live["y"] == [7 << 20, 9 << 20, 8 << 20]
    assert live["x"] == pytest.approx([0.010, 0.030, 0.050])
    assert live["width"] == [0.020] * 3
    workspace = trace(figure, "workspace of wgrad")
    assert (workspace["x"], workspace["y"]) == ([live["x"][0], live["x"][2]], [3 << 20] * 2)
    assert "7 MiB live, 3 MiB of workspace, 20.0 ms" in workspace["hovertext"][0]
    assert trace(figure, "memory budget 80 MiB")["y"] == [80 << 20] * 2
    assert figure[1]["barmode"] == "stack"


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
    data, layout, _ = page.figures["Fronts"]
    figure = ([one for one in data if one["visible"]], layout)
    front = trace(figure, "front, predicted")
    assert front["y"] == [0.040, 0.015, 0.015]
    assert front["x"][1] == 2 << 20
    # the plan's point, torch's, and what was not too slow to draw
    points = {one["name"]: one["y"] for one in figure[0] if one["mode"] == "markers"}
    assert points == {"rejected, predicted": [0.009], "torch's default": [0.030], "plan": [0.020]}
    rows = [row for row in page.cells("candidates") if row["#"] == "0"]
    assert [row["split"] for row in rows] == ["2x16 onednn", "32 fast", "32 slow", "32 broken"]
    assert [row["time"] for row in rows] == ["20.0 ms", "~9.00 ms", "1.00 s", "-"]
    assert [row["why not"] for row in rows] == ["the plan", *(one.reason for one in rejected)]


def test_every_kernel_can_be_chosen_and_is_drawn_alone(drawn, mixed):
    data, layout, _ = drawn(mixed).figures["Fronts"]
    (menu,) = layout["updatemenus"]
    assert [one["label"].split()[0] for one in menu["buttons"]] == ["0", "1", "2", "3"]
    seen = []
    for button, one in zip(menu["buttons"], mixed.kernels, strict=True):
        shown, axes = button["args"]
        chosen = [number for number, visible in enumerate(shown["visible"]) if visible]
        seen += chosen
        points = {data[number]["name"].split(",")[0]: data[number]["y"] for number in chosen}
        assert points["plan"] == [one.timing.time_ns / 1e9]
        assert ("torch's default" in points) == (one.default is not None)
        assert axes["yaxis.range"][1] > points["plan"][0]
        assert axes["xaxis.range"] != [] != axes["xaxis.tickvals"]
    assert seen == list(range(len(data)))
    assert menu["buttons"][0]["args"][0]["visible"] == [one["visible"] for one in data]


def test_no_note_is_repeated(drawn):
    notes = ["timed 3 of 9 candidates", "timed 4 of 9 candidates", "timed 3 of 9 candidates"]
    page = drawn(plan_of(*(kernel(notes=("im2col_gemm is default", note)) for note in notes)))
    assert page.texts.count("im2col_gemm is default (all kernels)") == 1
    assert page.texts.count("timed 3 of 9 candidates (kernels 0, 2)") == 1
    assert page.text.count("timed 4 of 9") == 1


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
