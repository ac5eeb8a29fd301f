"""``hf-stitch quickstart``: the whole idea in a few minutes, on real images, with no download.

It trains four small networks, two seeds of a ResNet and two of a ViT, and asks of every layer: can another network go
on from here? The functions below are the experiment, in the order in which it runs.
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

if TYPE_CHECKING:
    from torch import Tensor

    from hf_stitch.adapters import Adapter
    from hf_stitch.artefacts import StitchedModel
    from hf_stitch.data import Samples
    from hf_stitch.matchers import Matcher

NETWORKS = {"cnn-0": ("cnn", 0), "cnn-1": ("cnn", 1), "vit-0": ("vit", 0), "vit-1": ("vit", 1)}
"""Name -> architecture and seed."""

PAIRS = (("cnn-0", "cnn-1"), ("vit-0", "vit-1"), ("cnn-0", "vit-0"), ("vit-0", "cnn-0"))
"""Source and target: two seeds of one architecture, then two architectures, both ways."""

MATCHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "identity": ("identity", {}),
    "lstsq": ("lstsq", {}),
    "procrustes": ("procrustes", {}),
    "rank 8": ("low_rank", {"rank": 8}),
}
"""What the table calls it -> the matcher and its options."""

MOST = 4000
"""Training samples, where the data has more and ``--max-samples`` is not given; at most a quarter as many are held out."""

RULE = (
    "the fitted map of the highest accuracy relative to its target, among those that leave the target more than "
    "its head to run and are wholly above no map, the mean and chance"
)


def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for networks, results and figures.", file_okay=False)] = Path(
        "runs/quickstart"
    ),
    dataset: Annotated[
        str,
        typer.Option(help="Images with splits train and test, as uoft-cs/cifar10 or zalando-datasets/fashion_mnist."),
    ] = "sklearn:digits",
    data_dir: DataDir = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training samples.", min=1)] = 15,
    max_samples: Annotated[
        int | None, typer.Option(help="Training samples. [default: all, at most 4000]", min=1)
    ] = None,
    json: AsJson = False,
) -> None:
    """Train four small networks, stitch them at every depth, and see how well one goes on from another."""
    output = Output(json)
    out.mkdir(parents=True, exist_ok=True)
    train, test = read(dataset, data_dir, max_samples)
    output.show(f"{dataset}: {len(train)} images to train and fit on, {len(test)} held out")

    with silent_loading(), one_thread():
        with Progress(console=Console(stderr=True), transient=True) as bar:
            folders = train_networks(train, epochs, out / "networks", bar)
            networks = load_networks(folders)
            found = [result for pair in PAIRS for result in stitch_pair(*pair, networks, train, test, bar)]
        output.show(results.table(found))
        saved = {**folders, **results.save(found, out)}
        best = best_of(found, networks)
        if best is None:
            output.show(f"best: none; train for more epochs or on more samples\n  (it would be {RULE})")
        else:
            output.show(f"best: {best.pair} at {best.layers} by {best.matcher}, {best.score()}\n  ({RULE})")
            saved |= stitch.save(best.stitched, out / "best")
            check_round_trip(best, saved, test)
            output.show(
                f"loaded back, its model and its stitcher answer all {len(test)} held-out images as before, bit for bit"
            )

    output.show("\n".join(["saved", *(f"  {what:<10} {path}" for what, path in saved.items())]))
    output.record({
        "results": [result.to_dict() for result in found],
        "best": best and best.to_dict(),
        "rule": RULE,
        "saved": {what: str(path) for what, path in saved.items()},
    })  # fmt: skip


def read(dataset: str, data_dir: Path | None, count: int | None) -> tuple[Samples, Samples]:
    """Images to train on and held-out ones; where there are too many, some are drawn.

    Raises:
        ValueError: If the samples are no images with labels, or fewer than asked for.
    """
    train = read_samples(dataset, data_dir, "train", count, seed=0)
    test = read_samples(dataset, data_dir, "test", None, seed=0)
    if train.modality != "image" or train.labels is None:
        raise ValueError(f"the quickstart needs images with labels, got {train} from {dataset}")
    if count is None and len(train) > MOST:
        train = train.split(MOST, seed=0)[1]
    return train, test if len(test) <= MOST // 4 else test.split(MOST // 4, seed=0)[1]


def train_networks(samples: Samples, epochs: int, folder: Path, bar: Progress) -> dict[str, Path]:
    """Train every network and save it as its own library does.

    Returns:
        Name -> folder.
    """
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
    """The networks as anyone would load them: by their folders."""
    import hf_stitch

    return {name: hf_stitch.load(str(folder)) for name, folder in folders.items()}


def stitch_pair(
    source: str, target: str, networks: dict[str, Adapter], train: Samples, test: Samples, bar: Progress
) -> Iterator[Result]:
    """Stitch two networks at every depth, by every matcher; one pass over the data serves them all."""
    from hf_stitch.matchers.fitting import collect, fit_layer
    from hf_stitch.workflows._stitch import join

    a, b = networks[source], networks[target]
    pairs = list(zip(a.layers, b.layers, strict=True))  # four stages of a ResNet, four blocks of a ViT
    statistics = collect(a, b, pairs, train, progress=False)
    tries = [(pair, label) for pair in pairs for label in MATCHERS]
    for pair, label in bar.track(tries, description=f"stitching {source} → {target}"):
        name, options = MATCHERS[label]
        matcher = registries.matchers.build(name, **options)
        layer = fit_layer(matcher, statistics[pair], a.spec(pair[0]), b.spec(pair[1]))
        stitched = join(a, pair[0], layer, b, pair[1], task=b.task, recipe=recipe(matcher, train, test))
        score(stitched, test)
        yield Result(source, pair[0], target, pair[1], label, stitched, stitched.evaluation)


def recipe(matcher: Matcher, train: Samples, test: Samples) -> dict[str, Any]:
    """How a stitch was found: enough to find it again."""
    from hf_stitch.provenance import versions

    return {
        "matcher": matcher.to_dict(), "pooling": "none", "data": train.fingerprint, "samples": len(train),
        "test_data": test.fingerprint, "versions": versions(),
    }  # fmt: skip


def score(stitched: StitchedModel, test: Samples) -> None:
    """Measure a stitched model beside its baselines; it keeps the figures."""
    import hf_stitch

    stitched.evaluation = hf_stitch.evaluate(stitched, test, progress=False)
    stitched.config.scores = stitched.evaluation.to_dict()


def best_of(found: list[Result], networks: dict[str, Adapter]) -> Result | None:
    """The result that :data:`RULE` names, the first of equal ones; ``None`` if there is none."""

    def eligible(r: Result) -> bool:
        beaten = all(r.score().low > r.score(baseline).high for baseline in ("identity", "mean_only", "chance"))
        return r.matcher != "identity" and r.target_layer != networks[r.target].layers[-1] and beaten

    return max(filter(eligible, found), key=lambda r: r.score().value, default=None)


def check_round_trip(result: Result, saved: dict[str, Path], test: Samples) -> None:
    """Load the saved model, and the saved stitcher beside its parents, and compare their answers with earlier ones.

    Raises:
        ValueError: If an answer differs in any bit.
    """
    import hf_stitch

    before = logits(result.stitched, test)
    parents = [str(saved[name]) for name in (result.source, result.target)]
    again = {
        "model": hf_stitch.StitchedModel.from_pretrained(saved["model"]),
        "stitcher": hf_stitch.Stitcher.from_pretrained(saved["stitcher"]).attach(*parents),
    }
    for what, loaded in again.items():
        if not logits(loaded, test).equal(before):
            raise ValueError(f"the {what} saved in {saved[what]} answers differently than it did before")


def logits(stitched: StitchedModel, samples: Samples) -> Tensor:
    """What the model says to each sample: (samples, classes)."""
    import torch

    with torch.no_grad():
        return torch.cat([stitched(**stitched.preprocess(batch.samples)).logits for batch in samples.batches(64)])


@contextmanager
def silent_loading() -> Iterator[None]:
    """Without the bars that transformers shows when it loads weights, which takes no time here."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def one_thread() -> Iterator[None]:
    """With one thread for torch: in layers this small, several would do no more than wait for one another."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
