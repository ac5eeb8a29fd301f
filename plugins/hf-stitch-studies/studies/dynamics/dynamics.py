"""Training dynamics of a small ResNet on CIFAR-10: do lower layers settle first (Raghu et al. 2017)?

Networks of several seeds are trained with the Trainer of transformers, after a reference of another seed. During
training, three callbacks record the similarity to the initial state and to the reference, the stitchability into the
reference, and activations on test images.
"""

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import study
import torch
from dr_frankenstein import images
from PIL import Image
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional
from transformers import Trainer, TrainingArguments

import hf_stitch
from hf_stitch import Adapter, Samples
from hf_stitch.training import DynamicsRecorder, SimilarityCallback, StitchabilityCallback
from hf_stitch.training.dynamics import THRESHOLDS

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
NAME = "training_dynamics"
REFERENCE = 100  # seed of the reference
STRONG = 0.7  # minimum rank correlation of an order


SIZES = {"train": 6_000, "probe": 500, "stitch": 2_000, "epochs": 8, "seeds": 3}
"""Training images; test images for recorded activations; more test images, half to fit and half to score stitching
layers; epochs; watched networks."""


class Block(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.around = nn.Identity() if stride == 1 else nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, channels, height, width)`` to the same shape, or with stride 2 to half of height and width."""
        return functional.relu(self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x))))) + self.around(x))


class ResNet(nn.Module):
    """ResNet with a stride-2 stem, six residual blocks, mean pooling and a linear layer: 175,066 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        widths = ((16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1))
        self.blocks = nn.ModuleList(Block(*width) for width in widths)
        self.fc = nn.Linear(64, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Map images ``(batch, 3, 32, 32)`` to logits ``(batch, 10)``, and compute the loss if labels are given."""
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        logits = self.fc(x.mean((2, 3)))
        loss = {} if labels is None else {"loss": functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


def normalise(image: Image.Image) -> Tensor:
    """Convert a CIFAR image to a normalised tensor ``(3, 32, 32)``."""
    values = torch.from_numpy(np.asarray(image.convert("RGB"), dtype=np.float32) / 255).permute(2, 0, 1)
    return (values - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def flipped(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Collate a batch, and flip each image horizontally with probability 0.5."""
    pixels = torch.stack([row["pixel_values"] for row in rows])
    mirrored = torch.where(torch.rand(len(rows), 1, 1, 1) < 0.5, pixels.flip(3), pixels)
    return {"pixel_values": mirrored, "labels": torch.tensor([row["labels"] for row in rows])}


def main() -> None:
    arguments = study.parser(__doc__, "data-dir", "cache").parse_args()
    paths = [arguments.cache / NAME / f"{seed}.json" for seed in range(SIZES["seeds"])]
    if not all(path.is_file() for path in paths):
        watch(paths, arguments.data_dir)
    runs = [json.loads(path.read_text()) for path in paths]
    # The page only requires the similarity to the last moment.
    summaries = [{key: value for key, value in run.items() if key != "dynamics"} for run in runs]
    study.write_results(NAME, {"sizes": SIZES, "runs": summaries}, page, arguments.out)


def watch(paths: list[Path], data_dir: str | None) -> None:
    """Train the reference and each network without a file, and write the recorded figures."""
    train = images.raw("cifar10", "train", SIZES["train"], data_dir)
    test = images.raw("cifar10", "test", SIZES["probe"] + SIZES["stitch"], data_dir)
    probe, data = test.take(SIZES["probe"]), test.select(range(SIZES["probe"], len(test)))
    rows = [
        {"pixel_values": normalise(image), "labels": label}
        for batch in train.batches(500, progress="reading")
        for image, label in zip(batch.samples, batch.labels or [], strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        reference = trainer(REFERENCE, rows, folder)
        reference.train()
        theirs = loaded(reference)
        for seed, path in enumerate(paths):
            if not path.is_file():
                study.cached(path, partial(watched, seed, theirs, rows, probe, data, folder))
                print(f"seed {seed}: done", flush=True)


def loaded(trained: Trainer) -> Adapter:
    assert isinstance(trained.model, nn.Module)
    example = {"pixel_values": torch.randn(2, 3, 32, 32)}
    return hf_stitch.load(trained.model, example_inputs=example, processor=normalise)


def watched(
    seed: int, theirs: Adapter, rows: list[dict[str, Any]], probe: Samples, data: Samples, folder: str
) -> dict[str, Any]:
    """Train a network with all callbacks, and return its figures by layer."""
    training = trainer(seed, rows, folder)
    ours = loaded(training)
    recorder = DynamicsRecorder(Path(folder, f"recordings {seed}"), probe).attach(training, ours)
    start, against_reference = (SimilarityCallback(to, probe).attach(training, ours) for to in ("start", theirs))
    stitched = StitchabilityCallback(theirs, data).attach(training, ours)
    training.train()
    dynamics = recorder.result()
    stitching = by_kind(stitched, 0), by_kind(stitched, -1)
    return {
        "seed": seed,
        "accuracy": {"watched": accuracy_of(ours, data), "reference": accuracy_of(theirs, data)},
        "to_final": {layer: curve.round(4).tolist() for layer, curve in dynamics.to_final().items()},
        "settled": {str(threshold): dynamics.settled(threshold) for threshold in THRESHOLDS},
        "cka with start": next(iter(by_kind(start, -1).values())),
        "cka with reference": next(iter(by_kind(against_reference, -1).values())),
        "stitched before": stitching[0]["relative_accuracy"],
        "stitched after": stitching[1]["relative_accuracy"],
        "mean only": stitching[1]["mean_only"],
        "dynamics": dynamics.to_dict(),
    }


def by_kind(callback: SimilarityCallback | StitchabilityCallback, place: int) -> dict[str, dict[str, float]]:
    """Return the figures of the first (0) or last (-1) moment: kind -> layer -> value."""
    figures_by_kind: dict[str, dict[str, float]] = {}
    figures = callback.to_pandas()
    moment = sorted(figures.epoch.unique())[place]
    for name, value in figures[figures.epoch == moment][["figure", "value"]].itertuples(index=False):
        rest, _, layer = name.rpartition("/")
        figures_by_kind.setdefault(rest.rpartition("/")[2], {})[layer] = round(float(value), 4)
    return figures_by_kind


def trainer(seed: int, rows: list[dict[str, Any]], folder: str) -> Trainer:
    """Create a trainer for a network with random weights."""
    options = TrainingArguments(
        folder, seed=seed, num_train_epochs=SIZES["epochs"], per_device_train_batch_size=64, learning_rate=3e-3,
        weight_decay=0.05, warmup_steps=100, report_to=[], save_strategy="no", logging_strategy="epoch",
        remove_unused_columns=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    return Trainer(ResNet(), options, data_collator=flipped, train_dataset=rows)


def accuracy_of(network: Adapter, data: Samples) -> float:
    right = 0
    with torch.no_grad():
        for batch in data.batches(500):
            predictions = network.forward(network.preprocess(batch.samples))["logits"].argmax(1)
            right += int((predictions == torch.tensor(batch.labels)).sum())
    return right / len(data)


def order(run: dict[str, Any]) -> dict[str, float]:
    """Return the rank correlation of depth with the moment of settling by threshold, and with the covered share.

    The covered share refers to the distance from the initial similarity to 1, as the mean over the epochs in between.
    """
    depth = range(len(run["to_final"]))
    correlations = {limit: _correlation(depth, list(layers.values())) for limit, layers in run["settled"].items()}
    return correlations | {"share": _correlation(depth, list(covered(run).values()))}


def _correlation(x: Any, y: list[float]) -> float:
    return float(spearmanr(x, y)[0]) if len(set(y)) > 1 else 0.0


def covered(run: dict[str, Any]) -> dict[str, float]:
    """Return the covered share of the distance to the final state of each layer, as the mean over epochs."""
    curves = {layer: np.array(curve) for layer, curve in run["to_final"].items()}
    return {layer: float(((curve[1:-1] - curve[0]) / (1 - curve[0])).mean()) for layer, curve in curves.items()}


(BOTTOM_UP,) = study.stated(__file__)


def judged(run: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether lower layers settle first, and whether they also lead relative to their initial state."""
    correlations = order(run)
    return all(correlations[threshold] >= STRONG for threshold in run["settled"]), correlations["share"] <= -STRONG


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    verdicts = [judged(run) for run in record["runs"]]
    first, leads = map(list, zip(*verdicts, strict=True))
    ours = f"settle first in {sum(first)} networks, lead relative to their start in {sum(leads)}"
    return [BOTTOM_UP.row(ours, f"{len(verdicts)} networks", [any(first), all(map(all, verdicts))], len(verdicts))]


def page(record: dict[str, Any]) -> str:
    runs, sizes = record["runs"], record["sizes"]
    layers = list(runs[0]["to_final"])
    names = [*(f"settles at {threshold}" for threshold in runs[0]["settled"]), "covered share"]
    correlated = {f"rank correlation of depth with: {names[0]}": 0} | {name: n for n, name in enumerate(names[1:], 1)}
    ends = {"CKA with its own start": "cka with start", "CKA with the reference": "cka with reference",
            "stitched into it: before training": "stitched before", "after": "stitched after",
            "mean only": "mean only"}  # fmt: skip
    accuracy = ", ".join(f"{run['accuracy']['watched']:.3f}" for run in runs)
    return study.text(__file__).format(
        verdicts=study.verdicts(claims(record)), **sizes,
        accuracy=f"{accuracy}; reference {runs[0]['accuracy']['reference']:.3f}",
        orders=study.table(
            [(run["seed"], list(order(run).values())) for run in runs],
            {"seed": lambda seed, _: seed}
            | {title: lambda _, values, place=place: f"{values[place]:.2f}" for title, place in correlated.items()},
        ),
        curves=study.table(
            layers,
            {"layer": str}
            | {f"{epoch}": lambda layer, epoch=epoch: _spread([run["to_final"][layer][epoch] for run in runs])
               for epoch in range(sizes["epochs"])}
            | {f"settles at {at}": lambda layer, at=at: _spread([run["settled"][str(at)][layer] for run in runs], 1)
               for at in THRESHOLDS}
            | {"covered share": lambda layer: _spread([covered(run)[layer] for run in runs], 2)},
        ),
        ends=study.table(
            layers,
            {"layer": str} | {title: lambda layer, key=key: _spread([run[key][layer] for run in runs])
                              for title, key in ends.items()},
        ),
        findings="\n".join(f"- {finding}" for finding in _findings(runs)),
    )  # fmt: skip


def _findings(runs: list[dict[str, Any]]) -> Iterator[str]:
    layers = list(runs[0]["to_final"])
    start = [[run["to_final"][layer][0] for run in runs] for layer in (layers[0], layers[-1])]
    yield (
        f"The initial state explains part of the order: before the first step, the CKA with the final state is "
        f"{_spread(start[0])} for {layers[0]} and {_spread(start[1])} for {layers[-1]}."
    )
    agreement = [
        _correlation(list(run["cka with reference"].values()), list(run["stitched after"].values())) for run in runs
    ]
    yield (
        "Over layers, the rank correlation of similarity to the reference with stitchability into it is "
        f"{_spread(agreement, 2)} at the last epoch."
    )


def _spread(values: list[float], digits: int = 3) -> str:
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"
