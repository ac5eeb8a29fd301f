"""``hf-stitch quickstart``: a complete stitching experiment in a few minutes, on real images and without downloads.

The experiment trains two seeds of a ResNet and two seeds of a ViT, stitches pairs of them at every depth and scores
the results. The functions below run in the order in which they are defined.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from hf_stitch.cli import results, stitch
from hf_stitch.cli.options import AsJson, DataDir, read_samples
from hf_stitch.cli.output import Output
from hf_stitch.cli.results import Result
from hf_stitch.registry import registries
from hf_stitch.resources import one_thread

if TYPE_CHECKING:
    from torch import Tensor

    from hf_stitch.adapters import Adapter
    from hf_stitch.artefacts import StitchedModel
    from hf_stitch.data import Samples
    from hf_stitch.matchers import Matcher

NETWORKS = {"cnn-0": ("cnn", 0), "cnn-1": ("cnn", 1), "vit-0": ("vit", 0), "vit-1": ("vit", 1)}
"""Name -> architecture and seed."""

PAIRS = (("cnn-0", "cnn-1"), ("vit-0", "vit-1"), ("cnn-0", "vit-0"), ("vit-0", "cnn-0"))
"""Pairs of source and target: two seeds of one architecture, then two architectures in both directions."""

MATCHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "identity": ("identity", {}),
    "lstsq": ("lstsq", {}),
    "procrustes": ("procrustes", {}),
    "rank 8": ("low_rank", {"rank": 8}),
}
"""Name in the table -> name of the matcher and its options."""

MOST = 4000
"""Maximum number of training samples without ``--max-samples``. At most a quarter as many test samples are used."""

RULE = (
    "the fitted stitching layer with the highest relative accuracy, among those that are followed by at least one "
    "block of the target and whose interval lies above the intervals of identity, mean_only and chance"
)


def quickstart(
    out: Annotated[Path, typer.Option(help="Output folder for networks, results and figures.", file_okay=False)] = Path(
        "runs/quickstart"
    ),
    dataset: Annotated[
        str,
        typer.Option(
            help="Labelled images with splits train and test, e.g. uoft-cs/cifar10 or zalando-datasets/fashion_mnist."
        ),
    ] = "sklearn:digits",
    data_dir: DataDir = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training samples.", min=1)] = 15,
    max_samples: Annotated[
        int | None, typer.Option(help="Number of training samples. [default: all, at most 4000]", min=1)
    ] = None,
    json: AsJson = False,
) -> None:
    """Train four small networks, stitch them at every depth and score the stitched networks."""
    import hf_stitch.plots  # noqa: F401  # without matplotlib it fails here, before any work

    output = Output(json)
    out.mkdir(parents=True, exist_ok=True)
    train, test = read(dataset, data_dir, max_samples)
    output.show(f"{dataset}: {len(train)} training images, {len(test)} held-out images")

    with silent_loading(), one_thread():
        with Progress(console=Console(stderr=True), transient=True) as bar:
            folders = train_networks(train, epochs, out / "networks", bar)
            networks = load_networks(folders)
            found = [result for pair in PAIRS for result in stitch_pair(*pair, networks, train, test, bar)]
        output.show(results.table(found))
        saved = {**folders, **results.save(found, out)}
        best = best_of(found, networks)
        if best is None:
            output.show(f"best: none. Train for more epochs or on more samples.\n  (rule: {RULE})")
        else:
            output.show(f"best: {best.pair} at {best.layers} by {best.matcher}, {best.score()}\n  (rule: {RULE})")
            saved |= stitch.save(best.stitched, out / "best")
            check_round_trip(best, saved, test)
            output.show(
                f"reloaded: the saved model and the saved stitcher return bit-identical logits on all {len(test)} "
                "held-out images"
            )

    output.show("\n".join(["saved", *(f"  {what:<10} {path}" for what, path in saved.items())]))
    output.record({
        "results": [result.to_dict() for result in found],
        "best": best and best.to_dict(),
        "rule": RULE,
        "saved": {what: str(path) for what, path in saved.items()},
    })  # fmt: skip


def read(dataset: str, data_dir: Path | None, count: int | None) -> tuple[Samples, Samples]:
    """Read training and held-out images, with a random subset if the data set is large."""
    train = read_samples(dataset, data_dir, "train", count, seed=0)
    test = read_samples(dataset, data_dir, "test", None, seed=0)
    if train.modality != "image" or train.labels is None:
        raise ValueError(f"the quickstart needs images with labels, got {train} from {dataset}")
    if count is None and len(train) > MOST:
        train = train.split(MOST, seed=0)[1]
    return train, test if len(test) <= MOST // 4 else test.split(MOST // 4, seed=0)[1]


def train_networks(samples: Samples, epochs: int, folder: Path, bar: Progress) -> dict[str, Path]:
    """Train every network in :data:`NETWORKS` and save it in the format of its library."""
    from hf_stitch.cli import networks

    folders = {}
    for name, (architecture, seed) in NETWORKS.items():
        network = networks.build(architecture, seed, samples)
        for _ in bar.track(
            networks.train(network, samples, epochs, seed), total=epochs, description=f"training {name}"
        ):
            pass
        folders[name] = folder / name
        networks.save(network, folders[name])
    return folders


def load_networks(folders: dict[str, Path]) -> dict[str, Adapter]:
    """Load the trained networks from their folders."""
    import hf_stitch

    return {name: hf_stitch.load(str(folder)) for name, folder in folders.items()}


def stitch_pair(
    source: str, target: str, networks: dict[str, Adapter], train: Samples, test: Samples, bar: Progress
) -> Iterator[Result]:
    """Stitch two networks at every depth with every matcher, after one pass over the training images."""
    from hf_stitch.artefacts.joining import join
    from hf_stitch.data import PairedSamples
    from hf_stitch.pairs import CollectedPair, Pair
    from hf_stitch.running import Run

    a, b = networks[source], networks[target]
    pair = Pair(a, b).at(zip(a.layers, b.layers, strict=True))  # four stages of a ResNet, four blocks of a ViT
    collected = CollectedPair(pair, PairedSamples.of(train), Run(progress=False))
    matchers = {label: registries.matchers.build(name, **options) for label, (name, options) in MATCHERS.items()}
    found = {label: matcher.match(collected).layers for label, matcher in matchers.items()}
    tries = [(cell, label) for cell in pair.cells for label in MATCHERS]
    for (la, lb), label in bar.track(tries, description=f"stitching {source} → {target}"):
        made = recipe(matchers[label], train, test)
        stitched = join(a, la, found[label][la, lb], b, lb, task=b.task, recipe=made)
        score(stitched, test)
        yield Result(source, la, target, lb, label, stitched, stitched.evaluation)


def recipe(matcher: Matcher, train: Samples, test: Samples) -> dict[str, Any]:
    """Return the recipe of a stitching layer: everything needed to fit it again."""
    from hf_stitch.provenance import versions

    return {
        "matcher": matcher.to_dict(), "pooling": "none", "data": train.fingerprint, "samples": len(train),
        "test_data": test.fingerprint, "versions": versions(),
    }  # fmt: skip


def score(stitched: StitchedModel, test: Samples) -> None:
    """Score a stitched model and its baselines, and store the scores in the model."""
    import hf_stitch

    stitched.keep_scores(hf_stitch.evaluate(stitched, test, progress=False))


def best_of(found: list[Result], networks: dict[str, Adapter]) -> Result | None:
    """Return the result that :data:`RULE` selects, the first one in case of ties."""

    def eligible(r: Result) -> bool:
        beaten = all(r.score().low > r.score(baseline).high for baseline in ("identity", "mean_only", "chance"))
        return r.matcher != "identity" and r.target_layer != networks[r.target].layers[-1] and beaten

    return max(filter(eligible, found), key=lambda r: r.score().value, default=None)


def check_round_trip(result: Result, saved: dict[str, Path], test: Samples) -> None:
    """Reload the saved model and the saved stitcher, and check that their logits are bit-identical."""
    import hf_stitch

    before = logits(result.stitched, test)
    parents = [str(saved[name]) for name in (result.source, result.target)]
    again = {
        "model": hf_stitch.StitchedModel.from_pretrained(saved["model"]),
        "stitcher": hf_stitch.Stitcher.from_pretrained(saved["stitcher"]).attach(*parents),
    }
    for name, loaded in again.items():
        if not logits(loaded, test).equal(before):
            raise ValueError(f"the {name} saved in {saved[name]} returns other logits than before saving")


def logits(stitched: StitchedModel, samples: Samples) -> Tensor:
    """Compute the logits of a stitched model."""
    import torch

    with torch.no_grad():
        return torch.cat([stitched(**stitched.preprocess(batch.samples)).logits for batch in samples.batches(64)])


@contextmanager
def silent_loading() -> Iterator[None]:
    """Hide the progress bars of transformers, because these networks load instantly."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
