"""``python -m tests.ui.pictures FOLDER [OUTPUT]``: the documentation's pictures of the page, on the runs of ``make
ui-demo``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Page, ViewportSize, sync_playwright

from tests.ui.browser import launch, serving

RUNS = ("rate-1e-3", "rate-3e-3")
SIZE: ViewportSize = {"width": 1200, "height": 900}


def main(folder: Path, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    with serving(folder) as address, sync_playwright() as driver:
        page = launch(driver).new_page(viewport=SIZE)
        page.goto(address)
        page.get_by_role("link", name=RUNS[0]).wait_for()
        take(page, output / "runs.png", height=420)
        page.evaluate("name => { location.hash = '#/run/' + name; }", RUNS[1])
        page.get_by_role("heading", name="Loss").wait_for()
        take(page, output / "run.png")
        page.evaluate("names => { location.hash = '#/compare/' + names.join('/'); }", RUNS)
        page.get_by_text("optimizer.learning_rate").wait_for()
        take(page, output / "compare.png", height=760)


def take(page: Page, file: Path, height: int = SIZE["height"]) -> None:
    page.wait_for_timeout(1500)  # charts take the width that is left
    page.screenshot(path=file, clip={"x": 0, "y": 0, "width": SIZE["width"], "height": height})
    print(f"wrote {file}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "docs/assets/page"))
