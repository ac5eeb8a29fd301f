"""Pages in a real browser: nothing fails, nothing is requested, clicks work, and they are accessible."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_report_pages import EVIL, HISTORY, atlas_of, audit_of, dynamics_of, evaluation, grid_of

import hf_stitch
from hf_stitch.analysis import Plan, SimilarityAtlas
from hf_stitch.analysis.comparison.atlas import LayerSize
from hf_stitch.analysis.evaluation import Example
from hf_stitch.reports.drawing import COLOURS

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (360, 800, 1400)
SIZES = {side: {f"layer{i}": LayerSize(8 * i, i / 10) for i in range(3)} for side in "ab"}
PLAN = Plan("stitch", {"fitting": 1.0}, {"moments": 10}, {}, 10**9, 10**9)


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
    examples = (Example("1", 0.9, "c", "d", None, Image.new("RGB", (8, 8))), Example("2", 0.8, "a", "b", None, "text"))
    results = [atlas_of(sizes=SIZES), grid_of(), evaluation(examples), audit_of(), dynamics_of(), HISTORY, PLAN]
    hf_stitch.report(results, tmp_path / "page.html", title="All kinds of results")
    page = opened(browser, tmp_path / "page.html", width, scheme)
    assert not page.faults
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = axe.Axe().run(page).response
    unsure = [each for each in found["incomplete"] if each["id"] != "color-contrast"]  # it cannot tell for texts in SVG
    assert not [(fault["id"], fault["nodes"][0]["html"]) for fault in (*found["violations"], *unsure)]


def contrast(colour: str, other: str) -> float:
    """The contrast of two colours, as the guidelines for accessibility define it."""
    parts = np.array([[int(each[i : i + 2], 16) / 255 for i in (1, 3, 5)] for each in (colour, other)])
    linear = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    low, high = sorted(linear @ [0.2126, 0.7152, 0.0722])
    return float((high + 0.05) / (low + 0.05))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_curves_stand_out_and_the_keyboard_reaches_all(browser: Any, tmp_path: Path, scheme: str) -> None:
    hf_stitch.report([atlas_of(sizes=SIZES), dynamics_of(), PLAN], tmp_path / "page.html")
    page = opened(browser, tmp_path / "page.html", scheme=scheme)
    style = "getComputedStyle(document.documentElement).getPropertyValue('--{}').trim()"
    text, ground, quiet, link = (page.evaluate(style.format(name)) for name in ("text", "page", "quiet", "link"))
    assert all(contrast(each, ground) >= 4.5 for each in (text, quiet, link))
    assert all(contrast(each, ground) >= 3 for each in COLOURS)
    shown = page.locator(".plot text").evaluate_all("all => all.map(each => getComputedStyle(each).fill)")
    assert shown and set(shown) == {page.evaluate("getComputedStyle(document.body).color")}
    wanted = page.locator("select, input, summary, [tabindex='0']").evaluate_all(
        "all => all.filter(each => each.offsetParent && !each.closest('details:not([open]) > :not(summary)')).length"
    )
    focus = (
        "(each => { const first = !each.dataset.seen; each.dataset.seen = 1;"
        " return [first, getComputedStyle(each).outlineStyle] })(document.activeElement)"
    )
    for _ in range(wanted):
        page.keyboard.press("Tab")
        assert page.evaluate(focus) == [True, "solid"]


def test_hover_click_and_choice(browser: Any, tmp_path: Path) -> None:
    atlas = atlas_of()
    replace(atlas, values={"linear_cka": atlas["linear_cka"] / 2}).to_html(tmp_path / "page.html")
    page = opened(browser, tmp_path / "page.html")
    box = page.locator(".plot .nsewdrag").first.bounding_box()
    middle = box["x"] + box["width"] / 6, box["y"] + 5 * box["height"] / 6  # the last row, the first column
    page.mouse.move(*middle)
    page.wait_for_selector(".hovertext")
    assert "0.3750" in page.locator(".hovertext").first.text_content()
    page.mouse.click(*middle)
    page.wait_for_function("document.querySelector('select.row').value === '2'")
    assert page.locator("select.column").input_value() == "0"
    colours = "document.querySelector('.plot').data[0].zmax"
    assert page.evaluate(colours) == 0.5
    page.locator("input.whole").check()
    assert page.evaluate(colours) == 1
    assert not page.faults


def test_a_cell_shows_what_the_page_knows_of_the_pair(browser: Any, tmp_path: Path) -> None:
    recipe = {side: {"reference": {"weights_hash": digest}} for side, digest in zip("ab", "xy", strict=True)}
    values = {metric: np.full((2, 2), place / 10) for place, metric in enumerate(("linear_cka", "procrustes"), 1)}
    routes = dict.fromkeys(values, "moments")
    atlas = SimilarityAtlas(values, ("a0", "a1"), ("b0", "b1"), 50, "mean", routes, recipe=recipe)
    hf_stitch.report([atlas, grid_of(), grid_of(hashes=("p", "q"))], tmp_path / "page.html")
    page = opened(browser, tmp_path / "page.html")
    page.locator("select.row").first.select_option(index=1)
    shown = page.locator(".cell").first.text_content()
    assert shown.startswith("a1 → b0: linear_cka 0.1000, procrustes 0.2000, agreement 0.9000, auroc(knn) 0.9000")
    page.locator("select.view").first.select_option(index=1)
    assert "by procrustes are" in page.locator("figcaption").first.text_content()
    assert not page.faults


def test_a_slider_moves_through_the_layers(browser: Any, tmp_path: Path) -> None:
    dynamics_of().to_html(tmp_path / "page.html")
    page = opened(browser, tmp_path / "page.html")
    page.wait_for_selector("figure[data-figure='1'][data-ready]")
    slider = page.locator("input[type=range]")
    assert page.locator("output").text_content() == "block0"
    slider.press("ArrowRight")
    slider.press("ArrowRight")
    assert page.locator("output").text_content() == "block2"
    assert page.locator("figcaption").nth(1).text_content().startswith("block2: 0.500")
    assert not page.faults


def test_results_in_print_and_without_scripts_have_their_numbers(browser: Any, tmp_path: Path) -> None:
    evaluation().to_html(tmp_path / "page.html")
    page = browser.new_page(java_script_enabled=False)
    page.goto((tmp_path / "page.html").as_uri())
    page.locator("summary").first.click()
    assert "stitch, linear, 8 → 8" in page.locator("table").first.text_content()


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
