"""The gallery walked through in a real browser: compare, stitch, try, describe, download."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hf_stitch

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-space" / "bin" / "python"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not PYTHON.exists():
        pytest.skip("needs the environment of the gallery: make space")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"GRADIO_SERVER_PORT": str(port), "GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1"}
    log = tmp_path_factory.mktemp("gallery") / "log.txt"
    with log.open("w") as out:
        app = subprocess.Popen(
            [PYTHON, "app.py"], cwd=ROOT / "examples" / "space", env={**os.environ, **given}, stdout=out, stderr=out
        )
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5)
                break
            except OSError:
                assert app.poll() is None, log.read_text()
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
        app.terminate()
        app.wait()


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    if BROWSER is None:
        pytest.skip("needs a Chromium")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        tab = opened.new_page(viewport={"width": 1200, "height": 1000})
        tab.set_default_timeout(180_000)
        tab.goto(address)
        yield tab
        opened.close()


def downloaded(page: Any, name: str, folder: Path) -> Path:
    with page.expect_download() as given:
        page.locator(f"a[download*='{name}'], a[href*='{name}']").locator("visible=true").first.click()
    given.value.save_as(folder / name)
    return folder / name


def test_two_networks_are_compared_stitched_tried_and_downloaded(page: Any, tmp_path: Path) -> None:
    page.get_by_role("button", name="Compare", exact=True).click()
    page.get_by_text("Most similar:").wait_for()
    (atlas,) = hf_stitch.load_report(downloaded(page, "report.html", tmp_path))
    assert atlas.best_pair()
    page.get_by_role("tab", name="Stitch").click()
    page.get_by_role("button", name="Stitch", exact=True).click()
    page.get_by_text("Accuracy:").wait_for()
    with zipfile.ZipFile(downloaded(page, "stitched.zip", tmp_path)) as packed:
        packed.extractall(tmp_path)
    assert hf_stitch.StitchedModel.from_pretrained(tmp_path / "stitched").task == "image-classification"
    page.get_by_role("tab", name="Try").click()
    page.get_by_role("button", name="Example image").click()
    page.wait_for_timeout(2000)
    page.get_by_role("button", name="Try", exact=True).click()
    page.get_by_test_id("label-output-value").nth(1).wait_for()
    answers = page.get_by_test_id("label-output-value").all_text_contents()
    assert len(answers) == 2 and all(answer.strip() in set("0123456789") for answer in answers)


def test_a_captioner_gets_another_encoder(page: Any, tmp_path: Path) -> None:
    page.get_by_role("tab", name="Describe").click()
    page.get_by_role("button", name="Exchange", exact=True).click()
    page.get_by_text("captions name the right class for").wait_for()
    page.get_by_role("cell", name="a picture of a ").first.wait_for()
    shown = page.locator("td img").first
    assert shown.bounding_box()["height"] == 64 and shown.evaluate("image => image.naturalHeight") == 8
    (found,) = hf_stitch.load_report(downloaded(page, "report.html", tmp_path))
    assert found.folded and found.captions
    with zipfile.ZipFile(downloaded(page, "exchanged.zip", tmp_path)) as packed:
        assert "exchanged/model.safetensors" in packed.namelist()


def test_jobs_on_networks_run_one_at_a_time(address: str) -> None:
    given = "[each.concurrency_id for each in app.demo.fns.values() if hasattr(each.fn, '__wrapped__')]"
    command = [PYTHON, "-c", f"import app; print(*{given})"]
    done = subprocess.run(command, cwd=ROOT / "examples" / "space", capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["networks"] * 5


def test_what_is_refused_is_told(page: Any) -> None:
    page.reload()
    page.get_by_role("tab", name="Try").click()
    page.get_by_role("button", name="Try", exact=True).click()
    page.get_by_text("Stitch two networks first.").wait_for()
