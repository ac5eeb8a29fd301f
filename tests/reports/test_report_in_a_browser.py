"""Pages in a real browser: nothing fails, nothing is requested, clicks work, and they are accessible."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_report_pages import EVIL, atlas_of, evaluation, grid_of

import hf_stitch
from hf_stitch.analysis import SimilarityAtlas

pytestmark = pytest.mark.slow
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (360, 800, 1400)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    if BROWSER is None:
        pytest.skip("needs a Chromium")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


def opened(browser: Any, path: Path, width: int = 1400, scheme: str = "light") -> Any:
    """A page after its figures have been drawn; ``page.faults`` has errors and requests."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.faults = []
    page.on("console", lambda message: page.faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("request", lambda asked: page.faults.append(asked.url) if not asked.url.startswith("file:") else None)
    page.goto(path.as_uri())
    page.wait_for_selector("figure[data-ready]")
    return page


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_error_no_request_no_overflow_and_accessible(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs pip install axe-playwright-python")
    hf_stitch.report([atlas_of(), grid_of(), evaluation()], tmp_path / "page.html", title="Three results")
    page = opened(browser, tmp_path / "page.html", width, scheme)
    assert not page.faults
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = axe.Axe().run(page).response["violations"]
    serious = [fault for fault in found if fault["impact"] in ("serious", "critical")]
    assert not [(fault["id"], fault["nodes"][0]["html"]) for fault in serious]


def test_hover_click_and_choice(browser: Any, tmp_path: Path) -> None:
    atlas_of().to_html(tmp_path / "page.html")
    page = opened(browser, tmp_path / "page.html")
    box = page.locator(".plot .nsewdrag").first.bounding_box()
    middle = box["x"] + box["width"] / 6, box["y"] + 5 * box["height"] / 6  # the last row, the first column
    page.mouse.move(*middle)
    page.wait_for_selector(".hovertext")
    assert "0.7500" in page.locator(".hovertext").first.text_content()
    page.mouse.click(*middle)
    page.wait_for_function("document.querySelector('select.row').value === '2'")
    assert page.locator("select.column").input_value() == "0"
    page.locator("select.view").select_option(index=1)
    assert not page.faults


def test_a_hostile_result_stays_inert(browser: Any, tmp_path: Path) -> None:
    hf_stitch.report(atlas_of(name=EVIL, metric=EVIL, recipe={"data": EVIL}), tmp_path / "page.html", title=EVIL)
    page = opened(browser, tmp_path / "page.html")
    assert page.evaluate("window.owned") is None and not page.faults
    assert page.title().startswith("</script>")


def test_a_large_atlas_of_three_metrics_is_below_3_mb(browser: Any, tmp_path: Path) -> None:
    names = tuple(f"layer{i // 25}.{i % 25}.conv" for i in range(93))
    draw = np.random.default_rng(0)
    values = {metric: draw.random((93, 93)) for metric in ("linear_cka", "procrustes", "rsa")}
    atlas = SimilarityAtlas(values, names, names, 1000, "mean", dict.fromkeys(values, "moments"))
    atlas.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 3_000_000
    assert not opened(browser, tmp_path / "page.html").faults
