"""``hf-stitch quickstart``: the whole idea in a few minutes, on real data, with no download.

It trains four small networks, two seeds of a ResNet and two of a ViT, and asks of each layer: can another network go on
from here? The functions below are the experiment, in the order in which it runs.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from .options import AsJson, DataDir, read_samples
from .output import Output, as_json
from .stitch import save

if TYPE_CHECKING:
    from ..adapters import Adapter
    from ..analysis.evaluation import Evaluation, Score
    from ..data import Samples
    from ..matchers import Matcher
    from ..models import StitchedModel

NETWORKS = {"cnn-0": ("cnn", 0), "cnn-1": ("cnn", 1), "vit-0": ("vit", 0), "vit-1": ("vit", 1)}
"""Name -> architecture and seed."""

PAIRS = (("cnn-0", "cnn-1"), ("vit-0", "vit-1"), ("cnn-0", "vit-0"), ("vit-0", "cnn-0"))
"""Source and target: other seeds of one architecture, then other architectures, both ways."""

MATCHERS: dict[str, dict[str, Any]] = {"identity": {}, "lstsq": {}, "procrustes": {}, "low_rank": {"rank": 8}}
"""Matcher -> its options."""

MOST = 4000
"""Training samples, where there are more and the command line does not say how many."""

RULE = "best: the fitted map of the highest accuracy relative to its target, among those wholly above what no map and the mean reach"


@dataclass(frozen=True)
class Result:
    """Two networks, joined and scored."""

    source: str
    source_layer: str
    target: str
    target_layer: str
    matcher: str
    stitched: StitchedModel
    evaluation: Evaluation

    @property
    def pair(self) -> str:
        """For example ``cnn-0 → vit-0``."""
        return f"{self.source} → {self.target}"

    @property
    def layers(self) -> str:
        """Both layers, or the one where they have the same name."""
        return " → ".join(dict.fromkeys((self.source_layer, self.target_layer)))

    def score(self, predictor: str = "stitched") -> Score:
        """The accuracy of a predictor, relative to the target's."""
        return self.evaluation.scores[predictor]["relative_accuracy"]


def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for networks, results and figures.", file_okay=False)] = Path("runs/quickstart"),
    dataset: Annotated[
        str, typer.Option(help="Images with splits train and test, as uoft-cs/cifar10 or zalando-datasets/fashion_mnist.")
    ] = "sklearn:digits",
    data_dir: DataDir = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training samples.", min=1)] = 15,
    samples: Annotated[int | None, typer.Option(help="Training samples. [default: all, at most 4000]", min=1)] = None,
    json: AsJson = False,
) -> None:
    """Train four small networks, stitch them at every depth, and see how well one goes on from another."""
    output = Output(json)
    out.mkdir(parents=True, exist_ok=True)
    train, test = read(dataset, data_dir, samples)
    output.say(f"{dataset}: {len(train)} images to train and fit on, {len(test)} held out")

    with progress() as bar:
        folders = train_networks(train, epochs, out / "networks", bar)
        networks = load_networks(folders)
        results = [result for pair in PAIRS for result in stitch_pair(*pair, networks, train, test, bar)]

    output.say(table(results))
    best = best_of(results)
    saved = save_results(results, out) | (save_best(best, out / "best") if best else {})
    if best:
        output.say(f"{RULE}: {best.pair}, {best.layers}, {best.matcher}: {best.score()}")
        check_round_trip(best, saved, test)
        output.say(f"loaded back: model and stitcher, whose outputs for all {len(test)} held-out images equal the first, bit for bit")
    else:
        output.say("no fitted map is wholly above what no map and the mean reach: train for more epochs, on more samples")
    output.say("\n".join(f"  {what:<10} {path}" for what, path in saved.items()))
    output.record({"results": [record(r) for r in results], "best": record(best) if best else None, "rule": RULE})


def read(dataset: str, data_dir: Path | None, count: int | None) -> tuple[Samples, Samples]:
    """Images to train on and held-out ones, at most half as many as the default of the former."""
    train = read_samples(dataset, data_dir, "train", None, seed=0)
    test = read_samples(dataset, data_dir, "test", None, seed=0)
    if train.modality != "image" or train.labels is None:
        raise ValueError(f"the quickstart needs images with labels, got {train} from {dataset}")
    train, test = (
        part if len(part) <= most else part.split(most, seed=0)[1] for part, most in ((train, count or MOST), (test, MOST // 2))
    )
    return train, test


@contextmanager
def progress() -> Iterator[Progress]:
    """Bars on stderr; those of transformers are silent meanwhile."""
    from rich.console import Console
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            yield bar
    finally:
        if shown:
            logging.enable_progress_bar()


def train_networks(samples: Samples, epochs: int, folder: Path, bar: Progress) -> dict[str, Path]:
    """Train every network and save it as its own library does.

    Returns:
        Name -> folder.
    """
    from . import networks

    folders = {}
    for name, (architecture, seed) in NETWORKS.items():
        task = bar.add_task(f"training {name}", total=epochs)
        network = networks.build(architecture, seed, samples)
        networks.train(network, samples, epochs, seed, on_epoch=lambda task=task: bar.advance(task))
        folders[name] = folder / name
        networks.save(network, folders[name])
    return folders


def load_networks(folders: dict[str, Path]) -> dict[str, Adapter]:
    """The networks, as anyone would load them: by their folders."""
    import hf_stitch

    return {name: hf_stitch.load(str(folder)) for name, folder in folders.items()}


def stitch_pair(
    source: str, target: str, networks: dict[str, Adapter], train: Samples, test: Samples, bar: Progress
) -> Iterator[Result]:
    """Stitch two networks at every depth, by every matcher; one pass over the data serves them all."""
    from ..analysis.evaluation import evaluate
    from ..matchers import build_matcher
    from ..models.stitching import collect, fit_layer, join

    a, b = networks[source], networks[target]
    pairs = list(zip(a.layers, b.layers, strict=True))  # four stages, four blocks
    task = bar.add_task(f"stitching {source} → {target}", total=len(pairs) * len(MATCHERS))
    statistics = collect(a, b, pairs, train, progress=False)
    for at, to in pairs:
        for name, options in MATCHERS.items():
            matcher = build_matcher(name, **options)
            layer = fit_layer(matcher, statistics[at, to], a.form(at), b.form(to))
            stitched = join(a, at, layer, b, to, task=b.task, recipe=recipe(matcher, train, test))
            evaluation = evaluate(stitched, test, target=b, progress=False)
            stitched.config.scores = evaluation.to_dict()
            stitched.evaluation = evaluation
            bar.advance(task)
            yield Result(source, at, target, to, name, stitched, evaluation)


def recipe(matcher: Matcher, train: Samples, test: Samples) -> dict[str, Any]:
    """How a stitch was found."""
    from ..models.stitching import versions

    return {
        "matcher": matcher.to_dict(), "rows": "positions", "data": train.fingerprint, "samples": len(train),
        "test_data": test.fingerprint, "versions": versions(),
    }  # fmt: skip


def best_of(results: list[Result]) -> Result | None:
    """The result that :data:`RULE` names, the first of equal ones; ``None`` if none is above its baselines."""
    fitted = [r for r in results if r.matcher != "identity" and all(r.score().low > r.score(b).high for b in ("identity", "mean only"))]
    return max(fitted, key=lambda r: r.score().value, default=None)


def check_round_trip(result: Result, saved: dict[str, Path], test: Samples) -> None:
    """Load the saved model and the saved stitcher, and compare what they say with what was said before they were saved.

    Raises:
        ValueError: If an output differs in any bit.
    """
    import hf_stitch

    before = answers(result.stitched, test)
    again = {
        "model": hf_stitch.StitchedModel.from_pretrained(saved["model"]),
        "stitcher": hf_stitch.Stitcher.from_pretrained(saved["stitcher"]).attach(),
    }
    for what, model in again.items():
        if not answers(model, test).equal(before):
            raise ValueError(f"the {what} in {saved[what]} gives other outputs than before it was saved")


def answers(model: StitchedModel, samples: Samples) -> Tensor:
    """The logits of all samples."""
    import torch

    with torch.no_grad():
        return torch.cat([model(**model.preprocess(batch.samples)).logits for batch in samples.batches(64)])


def save_results(results: list[Result], folder: Path) -> dict[str, Path]:
    """Everything that was measured, as JSON; a line for each stitch, as CSV; and the figure.

    Returns:
        What was saved -> where.
    """
    saved = {what: folder / name for what, name in (("results", "results.json"), ("table", "results.csv"), ("figure", "results.png"))}
    saved["results"].write_text(as_json([record(r) for r in results]) + "\n", encoding="utf-8")
    lines = [line(r) for r in results]
    with saved["table"].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    draw(results, saved["figure"])
    return saved
