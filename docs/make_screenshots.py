r"""Take the pictures of docs/report.md: a report in Chromium, in a wide and a narrow window.

    python docs/make_screenshots.py report.html docs

It needs playwright, pillow and the system's Chromium. The committed pictures are of

    ucudnn tune examples/models.py:resnet50 --input 16x3x112x112 --workspace-limit 4MiB \
        --memory-budget +8MiB --curve --effort quick --time-budget 100 -o resnet50.plan.json
    ucudnn report resnet50.plan.json -o report.html
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

WIDTHS = (1400, 500)


def picture(browser: Browser, report: Path, width: int) -> Image.Image:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(report.resolve().as_uri())
    page.wait_for_selector("#Fronts .main-svg")
    shot = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    # A third of the size; the other methods change the colours of small marks.
    return shot.quantize(method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)


def main(report: str, folder: str) -> None:
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width in WIDTHS:
            taken = picture(browser, Path(report), width)
            taken.save(Path(folder) / f"report_{width}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
