"""What the gallery does, without its interface: networks, samples, comparison, stitch, answers and downloads.

Networks of the gallery are small and are trained where it runs, in some seconds each, on handwritten digits or on the
pictures that ``GALLERY_DATA`` names. Networks of the Hub are loaded with the code of transformers and timm only.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from datasets import ClassLabel, Dataset, Features, Image
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image as Pillow, UnidentifiedImageError

import hf_stitch
from hf_stitch.cli import networks
from hf_stitch.data import read_data

SHIPPED = {
    "CNN, seed 0": ("cnn", 0), "CNN, seed 1": ("cnn", 1), "transformer, seed 0": ("vit", 0),
    "transformer, seed 1": ("vit", 1),
}  # fmt: skip
"""Name -> architecture and seed."""

DATA = os.environ.get("GALLERY_DATA", "sklearn:digits")
"""A folder with one subfolder of pictures for each class, or the Hub id of labelled pictures with a split ``train``."""

SAMPLES, EPOCHS, SIDE = 600, 6, 256
"""Pictures, and epochs, with which the networks of the gallery are trained, and the longest side of a picture."""


@dataclass(frozen=True)
class Limits:
    """What the gallery takes.

    Attributes:
        parameters: Parameters of a network of the Hub.
        files: Number of own images, or lines of text.
        megabytes: Size of all own files together.
        layers: Layers of a network that are compared, evenly spaced.
        seconds: Predicted duration of a job.
    """

    parameters: int = 150_000_000
    files: int = 400
    megabytes: int = 50
    layers: int = 16
    seconds: float = 120.0


LIMITS = Limits()


class Refused(ValueError):
    """The gallery does not take this; the message says what it takes."""


@lru_cache(1)
def pictures() -> hf_stitch.Samples:
    """Return the images on which the networks of the gallery are trained, in colour as photographs are.

    Raises:
        ValueError: If :data:`DATA` has no images with labels.
    """
    read = hf_stitch.Samples.of(read_data(DATA, split="train"))
    if read.modality != "image" or not read.is_labelled:
        raise ValueError(f"GALLERY_DATA must name images with labels, got {read} from {DATA}")
    read = read.split(SAMPLES, seed=0)[1] if len(read) > SAMPLES else read
    images = [image.convert("RGB") for batch in read.batches(64) for image in batch.samples]
    for image in images:
        image.thumbnail((SIDE, SIDE))
    names = list(map(str, read.label_names or range(read.num_classes or 0)))
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    return hf_stitch.Samples.of(Dataset.from_dict({"image": images, "label": read.labels}, features=features))


@lru_cache
def trained(name: str) -> hf_stitch.Adapter:
    """Train a network of the gallery.

    Args:
        name: One of :data:`SHIPPED`.
    """
    architecture, seed = SHIPPED[name]
    found = networks.build(architecture, seed, pictures())
    for _ in networks.train(found, pictures(), EPOCHS, seed):
        pass
    return found


@lru_cache(4)
def loaded(name: str) -> hf_stitch.Adapter:
    """Load a network of the Hub, which runs no code of its repository.

    Args:
        name: Its id.
    """
    return hf_stitch.load(name)


def network(name: str, limits: Limits = LIMITS) -> hf_stitch.Adapter:
    """Return a network.

    Args:
        name: One of :data:`SHIPPED`, or the id of a model of transformers or timm on the Hub.
        limits: What the gallery takes.

    Raises:
        Refused: If the Hub has no such model, it is too large, or needs code of its repository.
    """
    if name in SHIPPED:
        return trained(name)
    try:
        about = HfApi().model_info(name, files_metadata=False)
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise Refused(f"The Hub has no public model {name!r}: {error}") from error
    size = about.safetensors.total if about.safetensors else None
    if size is None or size > limits.parameters:
        known = "an unknown number of" if size is None else f"{size:,}"
        raise Refused(f"{name} has {known} parameters; the gallery takes safetensors of up to {limits.parameters:,}.")
    try:
        return loaded(name)
    except (OSError, ValueError) as error:
        raise Refused(f"{name} cannot be loaded: {error}") from error


def samples(files: Sequence[str] | None, lines: str, limits: Limits = LIMITS) -> hf_stitch.Samples:
    """Return own samples, or the pictures of the gallery.

    Args:
        files: Paths of images.
        lines: Texts, one in each line.
        limits: What the gallery takes.

    Raises:
        Refused: If there are too many, or a file is no image.
    """
    texts = [line.strip() for line in lines.splitlines() if line.strip()]
    if not files and not texts:
        return pictures()
    if files and texts:
        raise Refused("Give images or texts, not both.")
    count = len(files or texts)
    if not 20 <= count <= limits.files:
        raise Refused(f"The gallery takes 20 to {limits.files} samples, got {count}.")
    if texts:
        return hf_stitch.Samples.of(texts)
    size = sum(Path(file).stat().st_size for file in files or ())
    if size > limits.megabytes * 10**6:
        raise Refused(f"The gallery takes images of {limits.megabytes} MB together, got {size / 10**6:.0f} MB.")
    images = []
    for file in files or ():
        try:
            with Pillow.open(file) as opened:
                images.append(opened.convert("RGB"))
        except (UnidentifiedImageError, Pillow.DecompressionBombError, OSError) as error:
            raise Refused(f"{Path(file).name} is no image that can be read: {error}") from error
    return hf_stitch.Samples.of(images)


def cuts(name: str, limits: Limits = LIMITS) -> list[str]:
    """Return the layers of a network at which it can be cut, evenly spaced if there are many.

    Args:
        name: Name of the network.
        limits: What the gallery takes.
    """
    layers = list(network(name, limits).layers)
    if len(layers) <= limits.layers:
        return layers
    return [layers[round(i * (len(layers) - 1) / (limits.layers - 1))] for i in range(limits.layers)]


def layer(name: str, chosen: str | None) -> str:
    """Return the chosen layer of a network, or the one in the middle if it has no such layer.

    Args:
        name: Name of the network.
        chosen: Layer of a list, which may be of another network.
    """
    found = cuts(name)
    return chosen if chosen in found else found[len(found) // 2]


def compare(a: str, b: str, data: hf_stitch.Samples, limits: Limits = LIMITS) -> hf_stitch.SimilarityAtlas:
    """Compare two networks.

    Args:
        a: Name of the first network.
        b: Name of the second one.
        data: The samples.
        limits: What the gallery takes.

    Raises:
        Refused: If it would take too long, or the networks do not take such samples.
    """
    options: dict[str, Any] = {"layers_a": cuts(a, limits), "layers_b": cuts(b, limits), "progress": False}
    first, second = network(a, limits), network(b, limits)
    return _within(limits, partial(hf_stitch.compare, first, second, data, permutations=100, **options))


def stitch(
    a: str, b: str, source_layer: str, target_layer: str, data: hf_stitch.Samples, limits: Limits = LIMITS
) -> hf_stitch.StitchedModel:
    """Stitch two networks by least squares, and score the result on held-out samples.

    Args:
        a: Name of the source.
        b: Name of the target.
        source_layer: Layer of the source.
        target_layer: Layer of the target.
        data: The samples.
        limits: What the gallery takes.

    Raises:
        Refused: If it would take too long, or the networks do not fit together.
    """
    options: dict[str, Any] = {"source_layer": source_layer, "target_layer": target_layer, "progress": False}
    source, target = network(a, limits), network(b, limits)
    return _within(limits, partial(hf_stitch.stitch, source, target, data, **options))


def verdict(evaluation: hf_stitch.analysis.Evaluation) -> str:
    """Say how good a stitched model is: its first figure beside those of target and baselines, and whether it tells.

    Args:
        evaluation: Scores of the stitched model.
    """
    figure = next(iter(evaluation.scores["stitched"]))
    name = figure.replace("_", " ").capitalize()
    rivals = {who.replace("_", " "): scores[figure].value for who, scores in evaluation.scores.items()
              if who in ("target", "mean_only", "chance") and figure in scores}  # fmt: skip
    beside = ", ".join(f"{who} {value:.3f}" for who, value in rivals.items())
    text = f"{name}: **{evaluation[figure]}** (95% interval){f'; {beside}' if beside else ''}."
    beaten = " and ".join(who for who in rivals if who != "target")
    good = [f"better than {beaten}: the map carries something over"] if beaten and not evaluation.no_better else []
    return " ".join([text, *(f"{line[0].upper()}{line[1:]}." for line in [*good, *evaluation.cautions])])


def answers(stitched: hf_stitch.StitchedModel, sample: Any, most: int = 5) -> dict[str, dict[str, float]]:
    """Return what the stitched model and its target answer for one sample.

    Args:
        stitched: The stitched model, a classifier.
        sample: An image or a text.
        most: Number of classes.

    Returns:
        ``stitched`` and ``target`` -> class -> probability.

    Raises:
        Refused: If the model is no classifier.
    """
    if stitched.task not in ("image-classification", "text-classification"):
        raise Refused("Only classifiers can be tried here.")
    names = stitched.config.id2label or {}
    target = stitched.parent("target")
    found = {}
    with torch.no_grad():
        outputs = {
            "stitched": stitched(**stitched.preprocess([sample])),
            "target": target.forward(target.preprocess([sample])),
        }
        for who, output in outputs.items():
            logits = output if isinstance(output, torch.Tensor) else output.logits
            values, places = logits[0].float().softmax(-1).topk(min(most, logits.shape[-1]))
            found[who] = {
                str(names.get(place, place)): value
                for place, value in zip(places.tolist(), values.tolist(), strict=True)
            }
    return found


def downloads(results: Mapping[str, Any], stitched: hf_stitch.StitchedModel | None, folder: Path) -> list[str]:
    """Write the report, and the stitched model as a zip.

    Args:
        results: Name -> result for the report.
        stitched: The stitched model.
        folder: Folder for the files.

    Returns:
        Paths of the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.html"
    hf_stitch.report(list(results.values()), report, title=" · ".join(results))
    files = [str(report)]
    if stitched is not None:
        with tempfile.TemporaryDirectory() as place:
            stitched.save_pretrained(Path(place) / "stitched")
            files.append(shutil.make_archive(str(folder / "stitched"), "zip", place))
    return files


def _within(limits: Limits, job: partial[Any]) -> Any:
    """Run a job if its plan is short enough.

    Raises:
        Refused: If it is not, or if the job refuses its input.
    """
    try:
        planned = hf_stitch.plan(job.func, *job.args, **job.keywords)
        if planned.seconds > limits.seconds:
            raise Refused(
                f"This would take {planned.seconds:.0f} s; the gallery takes jobs of {limits.seconds:.0f} s. Choose "
                "smaller networks or fewer samples."
            )
        return job()
    except hf_stitch.NotACutError as error:
        raise Refused(str(error)) from error
    except ValueError as error:
        raise error if isinstance(error, Refused) else Refused(str(error)) from error
