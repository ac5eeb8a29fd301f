"""Make the pictures and the transcript of the documentation: small trained networks, a terminal, a real browser.

    python docs/pictures/make.py

trains two CNNs and a transformer on the handwritten digits of scikit-learn (two minutes on two cores), compares and
stitches them, and writes files beside this script. It needs ``pip install "hf-stitch[browser]" scikit-learn`` and a
Chromium.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import hf_stitch
from hf_stitch.cli import networks
from hf_stitch.data import Samples, read_data
from hf_stitch.training import DynamicsRecorder

HERE = Path(__file__).parent
EPOCHS, WIDTH = 8, 1100
COMMANDS = (
    "hf-stitch layers cnn",
    "hf-stitch compare cnn vit --data sklearn:digits --split test --permutations 200 --report atlas.html",
    "hf-stitch stitch cnn vit --data sklearn:digits --split train --source-layer layer2.0 "
    "--target-layer vit.layers.1 --out stitched --report stitched.html",
)


def main() -> None:
    """Make all pictures."""
    train, test = (Samples.of(read_data("sklearn:digits", split=split)) for split in ("train", "test"))
    cnn, twin, vit = (trained(*which, train) for which in (("cnn", 0), ("cnn", 1), ("vit", 0)))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, network in (("cnn", cnn), ("vit", vit)):
            networks.save(network, folder / name)
        (HERE / "transcript.txt").write_text(transcript(folder), encoding="utf-8")
        atlas = hf_stitch.compare(cnn, twin, test, metrics=["linear_cka", "procrustes"], permutations=200)
        hf_stitch.report(atlas, folder / "atlas.html", title="Two seeds of a CNN on handwritten digits")
        noise = [each.point(lambda value: 255 - value) for each in images(test)[:150]]
        grid = hf_stitch.stitch_grid(
            cnn, vit, train, test_data=test, matchers=["recoloured"], detectors=["knn"], far_data=noise
        )
        hf_stitch.report(grid, folder / "grid.html", title="A CNN into a transformer, every layer into every layer")
        stitched = hf_stitch.stitch(
            cnn, vit, train, source_layer=cnn.layers[1], target_layer=vit.layers[1], test_data=test
        )
        evaluation = hf_stitch.evaluate(stitched, test, examples=12)
        hf_stitch.report(evaluation, folder / "stitch.html", title="The front of a CNN, the back of a transformer")
        dynamics = recorded(train, test, folder / "recordings")
        hf_stitch.report(dynamics, folder / "dynamics.html", title="A CNN in training")
        with browser() as page:
            for name, shown in (("atlas", 1), ("grid", 1), ("stitch", 2), ("dynamics", 2)):
                picture(page, folder / f"{name}.html", HERE / f"{name}.png", shown=shown)
            picture(page, folder / "stitch.html", HERE / "differences.png", ".pictures")


def transcript(folder: Path) -> str:
    """Run the commands in a folder with the networks, and return what a terminal shows."""
    settings = {"COLUMNS": "110", "NO_COLOR": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    shown = []
    for command in COMMANDS:
        ran = subprocess.run(
            command.split(), cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True, check=True
        )
        lines = [f"$ {command}", *(line.rstrip() for line in ran.stdout.splitlines())]
        shown.append("\n".join(lines).rstrip())
    return "\n\n".join(shown) + "\n"


def trained(architecture: str, seed: int, samples: hf_stitch.Samples) -> hf_stitch.Adapter:
    """Build and train a network."""
    network = networks.build(architecture, seed, samples)
    for loss in networks.train(network, samples, EPOCHS, seed):
        print(f"{architecture} {seed}: loss {loss:.3f}")
    return network


def images(samples: hf_stitch.Samples) -> list[Any]:
    """Return the raw images."""
    (batch,) = samples.batches(len(samples))
    return list(batch.samples)


def recorded(train: hf_stitch.Samples, test: hf_stitch.Samples, folder: Path) -> Any:
    """Train a CNN and compare each layer with itself between all epochs."""
    network = networks.build("cnn", 2, train)
    recorder = DynamicsRecorder(folder, test, layers=list(network.layers))
    recorder.measure(network, step=0, epoch=0.0)
    for epoch, _ in enumerate(networks.train(network, train, EPOCHS, 2), 1):
        recorder.measure(network, step=epoch, epoch=float(epoch))
    return recorder.result()


@contextmanager
def browser() -> Iterator[Any]:
    """Yield a page of a headless Chromium."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        opened.close()


def picture(page: Any, source: Path, target: Path, part: str = "", shown: int = 1) -> None:
    """Photograph a page from its head to the end of its first figures, or a part of it."""
    page.goto(source.as_uri())
    page.wait_for_selector("figure[data-ready]")
    page.wait_for_timeout(1000)
    if part:
        page.locator(part).first.screenshot(path=target)
        return
    figures = page.locator("figure[data-figure]")
    height = page.evaluate("document.documentElement.scrollHeight")
    last = figures.nth(min(shown, figures.count()) - 1).bounding_box()
    end = min(height, last["y"] + last["height"] + 10)
    page.screenshot(path=target, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": end})


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
