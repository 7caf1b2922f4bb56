"""The report in a real browser: nothing is fetched, nothing fails, and what it offers works."""

from __future__ import annotations

import csv
import shutil
from dataclasses import replace

import pytest

from ucudnn import cache as caches
from ucudnn.config import Config
from ucudnn.problem import Problem
from ucudnn.races import StepMemory
from ucudnn.reports.html import write_report
from ucudnn.tuning.rationale import rationales
from ucudnn.tuning.tuner import tune_problems

pytestmark = pytest.mark.nightly
MS, MIB = 1_000_000, 1 << 20
FIRST = Problem("fprop", 8, 2, 2, (9, 9), (1, 1))
PROBLEMS = (FIRST, replace(FIRST, out_channels=3), replace(FIRST, op="wgrad"))
# Contrast that text of normal size must have, by the Web Content Accessibility Guidelines.
READABLE = 4.5


def cost(ms_per_sample, mib_per_sample):
    return lambda size: (int(ms_per_sample * size * MS), int(mib_per_sample * size * MIB))


@pytest.fixture
def report_path(scripted, tmp_path):
    """A report of a plan of three kernels with everything that a plan may have."""
    pytest.importorskip("plotly", reason="draws a report")
    scripted(torch_default=cost(3, 0.5), fast=cost(1, 2), near=cost(1.2, 0.25))
    config = Config(
        workspace_limit="4MiB", cache=str(tmp_path / "cache"), effort="thorough", curve=True
    )
    layers = [(f"layer{number}", problem) for number, problem in enumerate(PROBLEMS)]
    plan = tune_problems(layers, config)
    calls = tuple((index, (9 + index) * MIB) for index in (0, 1, 2))
    memory = StepMemory(32 * MIB, MIB, 0, 0, MIB, 9 * MIB, 30 * MIB, 16 * MIB, calls=calls)
    plan = replace(plan, memory=memory)
    with caches.open(config.cache, "r") as cache:
        write_report(plan, tmp_path / "report.html", rationales(plan, cache))
    return tmp_path / "report.html"


@pytest.fixture(scope="module")
def browser():
    """Chromium without a screen."""
    api = pytest.importorskip("playwright.sync_api", reason="drives a browser")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("chromium, which opens reports, is not installed")
    with api.sync_playwright() as playwright:
        # Root, as in a container, has no sandbox.
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser, report_path):
    """A function that opens the report; at the end nothing may have been fetched or have failed."""
    contexts, requests, complaints = [], [], []

    def open_page(scheme="light", width=1400):
        viewport = {"width": width, "height": 900}
        context = browser.new_context(viewport=viewport, color_scheme=scheme)
        contexts.append(context)
        opened = context.new_page()
        opened.on("request", lambda request: requests.append(request.url))
        opened.on("console", lambda message: complaints.append(message.text))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.goto(report_path.as_uri())
        opened.wait_for_selector("#Fronts .main-svg")
        return opened

    yield open_page
    for context in contexts:
        context.close()
    assert requests == [report_path.as_uri()] * len(contexts)
    assert complaints == []


def test_every_section_is_drawn(page):
    opened = page()
    headings = opened.locator("h2").all_inner_texts()
    wanted = "Times, Workspaces, Splits, Timeline, Curve, Layout, Why these splits, All kernels"
    assert headings[:8] == wanted.split(", ")
    for name in ("Times", "Workspaces", "Splits", "Timeline", "Curve", "Fronts"):
        assert opened.locator(f"#{name} .main-svg").first.bounding_box()["height"] > 100
        assert opened.locator(f"#{name} .trace, #{name} .bars").count() > 0


@pytest.mark.parametrize(
    ("chart", "mark", "label"),
    [
        ("Times", ".bars .point path", "24.0 ms"),
        ("Timeline", ".bars .point path", "live"),
        # The plan's is the last series.
        ("Fronts", ".trace:last-child .points path", "plan: 4x2 fast8.00 ms in 4 MiB"),
    ],
)
def test_a_mark_that_is_hovered_says_what_it_is(page, chart, mark, label):
    opened = page()
    opened.locator(f"#{chart} {mark}").last.scroll_into_view_if_needed()
    texts = set()
    for found in opened.locator(f"#{chart} {mark}").all():
        box = found.bounding_box()
        opened.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        shown = opened.locator(f"#{chart} .hoverlayer .hovertext")
        shown.first.wait_for()
        texts.add(shown.first.text_content())
    assert any(label in text for text in texts), texts


def test_rows_are_filtered_by_text(page):
    opened = page()
    rows = opened.locator("#kernels tbody tr:visible")
    assert rows.count() == 3
    opened.fill("input[data-table=kernels]", "WGRAD")
    assert rows.count() == 1
    assert "wgrad" in rows.first.inner_text()
    assert opened.locator("output[for=kernels]").inner_text() == "1 of 3"
    opened.fill("input[data-table=kernels]", "")
    assert rows.count() == 3


def test_a_heading_sorts_by_value_and_then_the_other_way(page):
    opened = page()
    opened.select_option("#kernel", "")
    opened.click("#candidates th:has-text('workspace') button")
    head = opened.locator("#candidates th").all_inner_texts()
    place = next(index for index, text in enumerate(head) if "workspace" in text)

    def sizes():
        cells = opened.locator(f"#candidates tbody td:nth-child({place + 1})").all_inner_texts()
        factors = {"B": 1, "KiB": 1 << 10, "MiB": MIB}
        return [float(count) * factors[unit] for count, unit in map(str.split, cells)]

    rising = sizes()
    assert len(rising) > 3 < len(set(rising))
    assert rising == sorted(rising)
    assert opened.locator("#candidates th[aria-sort=ascending]").count() == 1
    opened.click("#candidates th:has-text('workspace') button")
    assert sizes() == sorted(rising, reverse=True)


def test_a_kernel_that_is_chosen_is_drawn_and_alone_in_the_table(page):
    opened = page()
    before = opened.evaluate("JSON.stringify(document.getElementById('Fronts').data)")
    other = opened.locator("#kernel option").nth(1).get_attribute("value")
    first = opened.locator("#kernel option").nth(0).get_attribute("value")
    numbers = opened.locator("#candidates tbody tr:visible td:first-child")
    assert set(numbers.all_inner_texts()) == {first}
    opened.select_option("#kernel", other)
    assert set(numbers.all_inner_texts()) == {other}
    texts = opened.locator("#candidates tbody tr:visible").all_inner_texts()
    assert sum("the plan" in text for text in texts) == 1
    assert any("times as long" in text for text in texts)
    drawn = opened.evaluate("JSON.stringify(document.getElementById('Fronts').data)")
    fronts = opened.evaluate("JSON.parse(document.getElementById('fronts').textContent)")
    assert len(fronts) == 3
    assert {trace["name"] for trace in fronts[other]["data"]} >= {"front, predicted", "plan"}
    assert (drawn == before) == (fronts[other]["data"] == fronts[first]["data"])
    opened.select_option("#kernel", "")
    assert set(numbers.all_inner_texts()) == {"0", "1", "2"}


def test_links_lead_to_sections_and_save_the_kernels(page, tmp_path):
    opened = page()
    opened.click("nav a:has-text('All kernels')")
    top = opened.locator("#to-all-kernels").bounding_box()["y"]
    assert 0 <= top < 900
    with opened.expect_download() as saved:
        opened.click("a[download]")
    saved.value.save_as(tmp_path / "kernels.csv")
    with (tmp_path / "kernels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["layers"] for row in rows] == ["layer0", "layer1", "layer2"]
    assert rows[0]["split"] == "4x2 fast"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_are_readable(page, scheme):
    opened = page(scheme)
    background = color(opened, "body", "backgroundColor")
    assert (luminance(background) < 0.5) == (scheme == "dark")
    for selector in ("body", ".under", "#kernels td", "#Times .ytick text", "#Fronts .legendtext"):
        attribute = "fill" if "text" in selector else "color"
        assert contrast(color(opened, selector, attribute), background) >= READABLE, selector
    # on the bars, which have the same colours in both
    inside = color(opened, "#Splits .bartext-inside", "fill")
    assert contrast(inside, color(opened, "#Splits .bars .point path", "fill")) >= READABLE


def color(opened, selector, attribute):
    script = "([one, name]) => getComputedStyle(document.querySelector(one))[name]"
    text = opened.evaluate(script, [selector, attribute])
    return [float(part) for part in text[text.index("(") + 1 : -1].split(",")[:3]]


def luminance(rgb):
    """Relative luminance of a colour in sRGB."""
    linear = [
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4
        for part in (channel / 255 for channel in rgb)
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("width", [1400, 500])
def test_the_page_is_no_wider_than_its_window(page, width):
    opened = page(width=width)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
