"""``hf-stitch quickstart``: a complete stitching experiment in a few minutes, on real images, without downloads.

Two seeds of a ResNet and two seeds of a ViT are trained, stitched at every depth, scored, saved and loaded again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

import hf_stitch
from hf_stitch.cli import stitch
from hf_stitch.cli.options import AsJson, DataDir
from hf_stitch.cli.output import Output
from hf_stitch.resources import one_thread

if TYPE_CHECKING:
    from hf_stitch.analysis import StitchGrid
    from hf_stitch.artefacts import StitchedModel
    from hf_stitch.data import Samples

NETWORKS = {"cnn-0": ("cnn", 0), "cnn-1": ("cnn", 1), "vit-0": ("vit", 0), "vit-1": ("vit", 1)}
"""Name -> architecture and seed."""
PAIRS = (("cnn-0", "cnn-1"), ("vit-0", "vit-1"), ("cnn-0", "vit-0"), ("vit-0", "cnn-0"))
"""Pairs of source and target: two seeds of one architecture, then two architectures in both directions."""
RULE = "the stitch of highest relative accuracy before the last block of the target that beats mean_only and chance"


def quickstart(
    out: Annotated[Path, typer.Option(help="Output folder.", file_okay=False)] = Path("runs/quickstart"),
    dataset: Annotated[str, typer.Option(help="Labelled images with splits train and test.")] = "sklearn:digits",
    data_dir: DataDir = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training samples.", min=1)] = 15,
    max_samples: Annotated[int, typer.Option(help="Most training samples; a quarter for testing.", min=4)] = 4000,
    json: AsJson = False,
) -> None:
    """Train four small networks, stitch them at every depth and score the stitched networks."""
    import transformers

    import hf_stitch.plots  # fails here without matplotlib, before any work

    output = Output(json)
    out.mkdir(parents=True, exist_ok=True)
    train = _read("train", dataset, data_dir, max_samples)
    test = _read("test", dataset, data_dir, max_samples // 4)
    output.show(f"{dataset}: {len(train)} training images, {len(test)} held-out images")
    transformers.utils.logging.disable_progress_bar()  # these networks load at once
    with one_thread():
        saved_paths = {name: _train_and_save(name, train, epochs, out / "networks" / name) for name in NETWORKS}
        nets = {name: hf_stitch.load(str(folder)) for name, folder in saved_paths.items()}
        grids: dict[str, StitchGrid] = {}
        for a, b in PAIRS:
            grid = hf_stitch.stitch_grid(nets[a], nets[b], train, test_data=test, matchers=["lstsq", "procrustes"])
            grids[f"{a} → {b}"] = grid
            output.show(f"{a} → {b}")
            output.show(grid)
        output.report(grids.values(), out / "report.html")
        best = max(chain(*map(_eligible, grids, grids.values())), default=None)
        if best is not None:
            _, pair, *cell = best
            stitched = grids[pair].stitched(*cell)
            stitched.keep_scores(hf_stitch.evaluate(stitched, test, progress=False))
            saved_paths |= stitch.save(stitched, out / "best")
            _check_round_trip(stitched, saved_paths, [str(saved_paths[name]) for name in pair.split(" → ")], test)
            output.show(stitched.evaluation)
            output.show(f"reloaded model and stitcher: bit-identical logits on all {len(test)} held-out images")
    summary = f"{pair} at {cell[0]} → {cell[1]} by {cell[2]}" if best else "none; train longer or on more samples"
    output.show(f"best: {summary} ({RULE})")
    output.show("\n".join(["saved", *(f"  {kind:<10} {path}" for kind, path in saved_paths.items())]))
    output.record({
        "grids": {pair: grid.to_dict() for pair, grid in grids.items()}, "best": best, "rule": RULE,
        "saved": {kind: str(path) for kind, path in saved_paths.items()}
    })  # fmt: skip


def _read(split: str, dataset: str, data_dir: Path | None, max_samples: int) -> Samples:
    """Read at most ``most`` images of a split, as a random subset."""
    samples = hf_stitch.Samples.of(hf_stitch.data.read_data(dataset, data_dir, split))
    if samples.modality != "image" or samples.labels is None:
        raise ValueError(f"the quickstart requires images with labels, got {samples} from {dataset}")
    return samples if len(samples) <= max_samples else samples.split(max_samples, seed=0)[1]


def _train_and_save(name: str, samples: Samples, epochs: int, folder: Path) -> Path:
    from hf_stitch.cli import networks

    network = networks.build(*NETWORKS[name], samples)
    steps = networks.train(network, samples, epochs, NETWORKS[name][1])
    # Iterating trains the network.
    list(track(steps, f"training {name}", epochs, console=Console(stderr=True), transient=True))
    networks.save(network, folder)
    return folder


def _eligible(pair: str, grid: StitchGrid) -> Iterator[tuple[float, str, str, str, str]]:
    """Yield relative accuracy, pair, layers and matcher of the stitches that are eligible for :data:`RULE`."""
    for matcher, a, b in product(grid.matchers, grid.layers_a, grid.layers_b[:-1]):
        if f"{matcher}: {a} -> {b}" not in {*grid.no_better, *grid.undefined}:
            yield grid.score(a, b, matcher=matcher).value, pair, a, b, matcher


def _check_round_trip(stitched: StitchedModel, saved: dict[str, Path], parents: list[str], test: Samples) -> None:
    """Raise an error if the logits of the saved model or stitcher, loaded again, are not bit-identical."""
    import torch

    loaded = hf_stitch.StitchedModel.from_pretrained(saved["model"])
    attached = hf_stitch.Stitcher.from_pretrained(saved["stitcher"]).attach(*parents)
    with torch.no_grad():
        for batch in test.batches(64):
            original, *rest = (
                model(**model.preprocess(batch.samples)).logits for model in (stitched, loaded, attached)
            )
            if not all(logits.equal(original) for logits in rest):
                raise ValueError(f"the artefacts in {saved['model'].parent} return different logits than before saving")
