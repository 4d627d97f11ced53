"""The page in a real browser: Debian's Chromium, driven by playwright (`pip install playwright`). Axe, which looks for
what keeps people out, is read from the file that MANYHANDS_AXE names (axe.min.js of npm's axe-core).
"""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import write_place
from tests.ui.browser import CHROMIUM, launch, serving
from tests.ui.conftest import step_row, write_run

if not os.environ.get("MANYHANDS_NEEDS_BROWSER"):  # .ci/run sets it once it has installed both
    pytest.importorskip("playwright", reason="no playwright: pip install 'manyhands[browser]'")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install -y chromium-headless-shell", allow_module_level=True)
from playwright.sync_api import expect, sync_playwright

AXE = os.environ.get("MANYHANDS_AXE")
HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[31m"
WAYS: dict[str, dict[str, Any]] = {
    "light": {},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 375, "height": 800}},
}
VIEWS = {
    "": "Runs",
    "run/done": "done",
    "run/failed": "failed",
    "compare/done/failed": "Compare",
    "plan": "Plan a run",
    "data": "Data",
    "queue": "Queue",
}
pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page") / "runs"
    folder.mkdir()
    write_run(folder, "done", num_rows=700, num_steps=700)
    write_run(folder, "failed", state="failed", reason=f"lost {HOSTILE}", model=f"org/{HOSTILE}", rate=3e-4)
    write_run(folder, "live", state="running", num_rows=5, pid=os.getpid())
    items = [{"id": 1, "title": HOSTILE, "words": ["train", HOSTILE], "added": time.time()}]
    (folder / "queue.json").write_text(json.dumps({"paused": True, "items": items}))
    return folder


@pytest.fixture(scope="module")
def address(folder):
    with serving(folder) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as driver:
        yield launch(driver)


@pytest.fixture
def open_page(browser, address):
    contexts = []

    def open_page(view="", **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.complaints = []
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("dialog", lambda dialog: page.complaints.append("a script of the data ran"))
        page.goto(f"{address}#/{view}")
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("way", WAYS)
def test_every_view_is_sound(open_page, way):
    page = open_page(**WAYS[way])
    for view, title in VIEWS.items():
        page.evaluate("view => { location.hash = '#/' + view; }", view)
        expect(page.get_by_role("heading", name=title, level=1)).to_be_visible()
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} is wider than the screen"
        if AXE:
            page.evaluate(Path(AXE).read_text(encoding="utf-8"))
            found = page.evaluate("axe.run().then(found => found.violations.map(one => [one.id, one.nodes[0].html]))")
            assert found == [], view
    assert page.complaints == []


def test_a_live_run_until_it_fails(open_page, folder):
    page = open_page("run/live")
    expect(page.get_by_text("step 5 / 40")).to_be_visible()
    with (folder / "live" / "metrics.jsonl").open("a") as rows:
        rows.writelines(step_row(step) for step in range(6, 9))
    expect(page.get_by_text("step 8 / 40")).to_be_visible()
    status = {"state": "failed", "time": time.time(), "reason": "rank 1 was killed"}
    (folder / "live" / "status.json").write_text(json.dumps(status))
    expect(page.get_by_role("alert")).to_contain_text("rank 1 was killed")
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    assert page.complaints == []


def test_what_comes_from_files_is_text(open_page):
    page = open_page("run/failed")
    expect(page.get_by_role("alert")).to_contain_text("lost <img src=x onerror=alert(1)>\\u202e\\u001b[31m")
    page.evaluate("location.hash = '#/queue'")
    expect(page.get_by_role("heading", name="<img src=x")).to_be_visible()
    assert page.locator("img").count() == 0
    assert page.complaints == []


def test_keyboard_alone(open_page):
    page = open_page()
    expect(page.get_by_role("link", name="done")).to_be_visible()
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "done":
            break
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="done", level=1)).to_be_visible()


def test_two_chosen_runs_are_compared(open_page):
    page = open_page()
    for name in ("done", "failed"):
        page.get_by_role("checkbox", name=f"Compare {name}").check()
    page.get_by_role("button", name="Compare 2").click()
    expect(page.get_by_text("optimizer.learning_rate")).to_be_visible()
    page.get_by_role("combobox", name="Horizontal axis").select_option("tokens")
    expect(page.get_by_role("img", name="Training loss by tokens")).to_be_visible()


def test_a_plan_for_absent_gpus_and_a_wrong_value(open_page, tmp_path):
    write_place(tmp_path)
    page = open_page("plan", viewport={"width": 375, "height": 800})
    fields = {"Model": f"{tmp_path}/model", "Training data": f"{tmp_path}/rows.jsonl", "Learning rate": "fast"}
    for label, value in {**fields, "GPUs, here or not": "2xH100", "Price of a GPU-hour": "2.5"}.items():
        page.get_by_label(label).fill(value)
    page.get_by_label("Method").select_option("lora")
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("optimizer.learning_rate", timeout=120_000)
    page.get_by_label("Learning rate").fill("1e-4")
    page.get_by_role("button", name="Plan", exact=True).click()
    chart = page.get_by_role("img", name=re.compile("candidates by memory and seconds"))
    expect(chart).to_be_visible(timeout=120_000)
    rows = page.get_by_role("region", name="Candidates").get_by_role("row")
    assert chart.locator("circle").count() == rows.count() - 1 > 2
    assert float(chart.locator("text").first.evaluate("text => text.getBoundingClientRect().height")) > 9, (
        "too small to read"
    )
    expect(rows.nth(1)).to_contain_text(re.compile(r"[\d.]+ GiB[\d.]+ schosen"))
    expect(rows.last).to_contain_text(re.compile("slower|more memory|does not fit"))
    expect(page.get_by_text("at 2.50 a GPU-hour")).to_be_visible()
    assert all("400 (Bad Request)" in text for text in page.complaints), "the browser reports the wrong value's answer"


def test_two_hundred_runs(open_page, folder):
    for number in range(200):
        write_run(folder, f"many-{number:03d}", num_rows=3)
    try:
        page = open_page()
        expect(page.get_by_text("203 shown")).to_be_visible(timeout=15_000)
        page.get_by_role("searchbox").fill("many-17")
        expect(page.get_by_text("10 shown")).to_be_visible()
    finally:
        for number in range(200):
            shutil.rmtree(folder / f"many-{number:03d}")


def test_a_run_whose_launcher_is_killed(open_page, folder):
    launcher = subprocess.Popen(["sleep", "60"])
    write_run(folder, "lost", state="running", pid=launcher.pid)
    page = open_page()
    page.get_by_role("link", name="lost").click(timeout=10_000)
    expect(page.get_by_role("heading", name="lost", level=1)).to_be_visible()
    launcher.kill()
    launcher.wait()
    expect(page.get_by_text("killed", exact=True)).to_be_visible(timeout=10_000)
    assert page.complaints == []
    shutil.rmtree(folder / "lost")


def test_a_million_rows(open_page, folder):
    run = write_run(folder, "long", num_rows=0, num_steps=1_000_000)
    before, after = step_row(1).split('"step": 1', 1)
    with (run / "metrics.jsonl").open("w") as rows:
        rows.writelines(f'{before}"step": {step}{after}' for step in range(1, 1_000_001))
    page = open_page()
    expect(page.get_by_role("link", name="long")).to_be_visible(timeout=10_000)
    page.get_by_role("link", name="long").click()
    expect(page.get_by_role("img", name=re.compile("Loss by step: training"))).to_be_visible()
    expect(page.get_by_text("step 1,000,000 / 1,000,000")).to_be_visible()
    expect(page.get_by_text("A sample of the rows is shown")).to_be_visible()
    assert page.complaints == []
    shutil.rmtree(run)
