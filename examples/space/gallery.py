"""The gallery without its interface: networks, samples, comparison, stitch, predictions, captions, downloads.

The gallery trains its small networks where it runs, each in a few seconds, on handwritten digits or on the images in
``GALLERY_DATA``. Networks of the Hub are loaded with the code of transformers and timm only.
"""

from __future__ import annotations

import base64
import html
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from datasets import ClassLabel, Dataset, Features, Image
from hf_stitch_towers import Exchanged, ImageAndTextProcessor
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image as Pillow, UnidentifiedImageError
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, PreTrainedTokenizerFast, VisionEncoderDecoderConfig, VisionEncoderDecoderModel

import hf_stitch
from hf_stitch.cli import networks
from hf_stitch.data import read_data

SHIPPED = {
    "CNN, seed 0": ("cnn", 0), "CNN, seed 1": ("cnn", 1), "transformer, seed 0": ("vit", 0),
    "transformer, seed 1": ("vit", 1),
}  # fmt: skip
"""Name -> architecture and seed."""

TRANSFORMERS = [name for name, (architecture, _) in SHIPPED.items() if architecture == "vit"]
"""Networks of the gallery that a captioner can be trained on."""

DATA = os.environ.get("GALLERY_DATA", "sklearn:digits")
"""A folder with one subfolder of images for each class, or the Hub id of labelled images with a split ``train``."""

SAMPLES, EPOCHS, SIDE = 800, 6, 256
"""Number of images, epochs of training a CNN on them, and the longest side of an image."""

LONGER = 5
"""Factor for the epochs of transformers."""

UNSEEN, FEWEST = 0.25, 43
"""Share of the images that is held out from training, and least number of images for captions."""

PAD, START, END = range(3)
"""Special tokens of a captioner."""


@dataclass(frozen=True)
class Limits:
    """Limits of the gallery.

    Attributes:
        parameters: Parameters of a network of the Hub.
        files: Number of uploaded images, or lines of text.
        megabytes: Total size of the uploaded files.
        layers: Number of layers of a network to compare, evenly spaced.
        seconds: Predicted duration of a job.
    """

    parameters: int = 150_000_000
    files: int = 400
    megabytes: int = 50
    layers: int = 16
    seconds: float = 120.0


LIMITS = Limits()


class Refused(ValueError):
    """Error for input that the gallery does not accept, with the accepted input in its message."""


@lru_cache(1)
def pictures() -> hf_stitch.Samples:
    """Return the images to train the networks of the gallery on, in RGB.

    Raises:
        ValueError: If :data:`DATA` does not contain images of two or more classes.
    """
    data = hf_stitch.Samples.of(read_data(DATA, split="train"))
    if data.modality != "image" or not data.is_labelled or len(data) < 4 or (data.num_classes or 0) < 2:
        raise ValueError(f"GALLERY_DATA must name four or more images of two or more classes, got {data} from {DATA}")
    data = data.split(SAMPLES, seed=0)[1] if len(data) > SAMPLES else data
    images = [image.convert("RGB") for batch in data.batches(64) for image in batch.samples]
    for image in images:
        image.thumbnail((SIDE, SIDE))
    names = list(map(str, data.label_names or range(data.num_classes or 0)))
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    return hf_stitch.Samples.of(Dataset.from_dict({"image": images, "label": data.labels}, features=features))


@lru_cache
def trained(name: str) -> hf_stitch.Adapter:
    """Train and return one network of :data:`SHIPPED`."""
    architecture, seed = SHIPPED[name]
    classifier = networks.build(architecture, seed, pictures())
    epochs = EPOCHS * (LONGER if architecture == "vit" else 1)
    for _ in networks.train(classifier, pictures().split(UNSEEN, seed=0)[0], epochs, seed):
        pass
    return classifier


@lru_cache(4)
def loaded(name: str) -> hf_stitch.Adapter:
    """Load a network of the Hub by its id, without running code from its repository."""
    return hf_stitch.load(name)


def network(name: str, limits: Limits = LIMITS) -> hf_stitch.Adapter:
    """Return a network of the gallery or of the Hub.

    Args:
        name: One of :data:`SHIPPED`, or the id of a model of transformers or timm on the Hub.
        limits: Limits of the gallery.

    Raises:
        Refused: If the model does not exist on the Hub, is too large, or needs code from its repository.
    """
    if name in SHIPPED:
        return trained(name)
    try:
        about = HfApi().model_info(name, files_metadata=False)
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise Refused(f"The Hub does not have a public model {name!r}: {error}") from error
    size = about.safetensors.total if about.safetensors else None
    if size is None or size > limits.parameters:
        count = "an unknown number of" if size is None else f"{size:,}"
        raise Refused(f"{name} has {count} parameters; the gallery accepts safetensors of up to {limits.parameters:,}.")
    try:
        return loaded(name)
    except (OSError, ValueError) as error:
        raise Refused(f"{name} cannot be loaded: {error}") from error


def samples(files: Sequence[str] | None, lines: str, limits: Limits = LIMITS) -> hf_stitch.Samples:
    """Return uploaded samples, or the images of the gallery.

    Args:
        files: Paths of images.
        lines: Texts, one per line.
        limits: Limits of the gallery.

    Raises:
        Refused: If there are too few or too many, or a file is not an image.
    """
    texts = [line.strip() for line in lines.splitlines() if line.strip()]
    if not files and not texts:
        return pictures()
    if files and texts:
        raise Refused("Upload images or enter texts, not both.")
    count = len(files or texts)
    if not 20 <= count <= limits.files:
        raise Refused(f"The gallery accepts 20 to {limits.files} samples, got {count}.")
    if texts:
        return hf_stitch.Samples.of(texts)
    size = sum(Path(file).stat().st_size for file in files or ())
    if size > limits.megabytes * 10**6:
        raise Refused(f"The gallery accepts images of {limits.megabytes} MB in total, got {size / 10**6:.0f} MB.")
    images = []
    for file in files or ():
        try:
            with Pillow.open(file) as opened:
                images.append(opened.convert("RGB"))
        except (UnidentifiedImageError, Pillow.DecompressionBombError, OSError) as error:
            raise Refused(f"{Path(file).name} is not a readable image: {error}") from error
    return hf_stitch.Samples.of(images)


def cuts(name: str, limits: Limits = LIMITS) -> list[str]:
    """Return the cuts of a network, evenly spaced if there are many."""
    layers = list(network(name, limits).layers)
    if len(layers) <= limits.layers:
        return layers
    return [layers[round(i * (len(layers) - 1) / (limits.layers - 1))] for i in range(limits.layers)]


def layer(name: str, chosen: str | None) -> str:
    """Return the chosen layer of a network, or its middle layer if the choice is not one of its layers."""
    layers = cuts(name)
    return chosen if chosen in layers else layers[len(layers) // 2]


def compare(a: str, b: str, data: hf_stitch.Samples, limits: Limits = LIMITS) -> hf_stitch.SimilarityAtlas:
    """Compare two networks by their names.

    Raises:
        Refused: If it would take too long, or a network does not accept the samples.
    """
    options: dict[str, Any] = {"layers_a": cuts(a, limits), "layers_b": cuts(b, limits), "progress": False}
    first, second = network(a, limits), network(b, limits)
    return _within(limits, partial(hf_stitch.compare, first, second, data, permutations=100, **options))


def stitch(
    a: str, b: str, source_layer: str, target_layer: str, data: hf_stitch.Samples, limits: Limits = LIMITS
) -> hf_stitch.StitchedModel:
    """Stitch two networks by least squares, and score the result on held-out samples.

    Raises:
        Refused: If it would take too long, or the networks do not fit together.
    """
    options: dict[str, Any] = {"source_layer": source_layer, "target_layer": target_layer, "progress": False}
    source, target = network(a, limits), network(b, limits)
    return _within(limits, partial(hf_stitch.stitch, source, target, data, **options))


def verdict(evaluation: hf_stitch.analysis.Evaluation) -> str:
    """Return a sentence on a stitched model: its first score next to target and baselines, and its cautions."""
    score = next(iter(evaluation.scores["stitched"]))
    name = score.replace("_", " ").capitalize()
    references = {row.replace("_", " "): scores[score].value for row, scores in evaluation.scores.items()
                  if row in ("target", "mean_only", "chance") and score in scores}  # fmt: skip
    compared = ", ".join(f"{row} {value:.3f}" for row, value in references.items())
    text = f"{name}: **{evaluation[score]}** (95% interval){f'; {compared}' if compared else ''}."
    beaten = " and ".join(row for row in references if row != "target")
    good = [f"better than {beaten}: the map transfers information"] if beaten and not evaluation.no_better else []
    return " ".join([text, *(f"{line[0].upper()}{line[1:]}." for line in [*good, *evaluation.cautions])])


def answers(stitched: hf_stitch.StitchedModel, sample: Any, most: int = 5) -> dict[str, dict[str, float]]:
    """Return the predictions of the stitched model and its target for one sample.

    Args:
        stitched: The stitched model, a classifier.
        sample: An image or a text.
        most: Number of classes.

    Returns:
        ``stitched`` and ``target`` -> class -> probability.

    Raises:
        Refused: If the model is not a classifier.
    """
    if stitched.task not in ("image-classification", "text-classification"):
        raise Refused("Only classifiers can be tried here.")
    names = stitched.config.id2label or {}
    target = stitched.parent("target")
    predictions = {}
    with torch.no_grad():
        outputs = {
            "stitched": stitched(**stitched.preprocess([sample])),
            "target": target.forward(target.preprocess([sample])),
        }
        for name, output in outputs.items():
            logits = output if isinstance(output, torch.Tensor) else output.logits
            probabilities, classes = logits[0].float().softmax(-1).topk(min(most, logits.shape[-1]))
            predictions[name] = {
                str(names.get(index, index)): probability
                for index, probability in zip(classes.tolist(), probabilities.tolist(), strict=True)
            }
    return predictions


@dataclass(frozen=True)
class Described:
    """Captions of held-out images, before and after the vision encoder of a captioner is exchanged.

    Attributes:
        found: The exchanged captioner, and its scores against the original.
        pictures: The held-out images.
        classes: Name of the class of each image.
        before: Captions by the original.
        after: Captions by the exchanged captioner.
    """

    found: Exchanged
    pictures: Sequence[Pillow.Image]
    classes: Sequence[str]
    before: Sequence[str]
    after: Sequence[str]

    def right(self, captions: Sequence[str]) -> float:
        """Return the share of captions that name the class of their image."""
        return sum(map(str.__eq__, captions, map(caption_of, self.classes))) / len(self.classes)

    def verdict(self) -> str:
        """Return whether the captioner is as good as before, and how often captions name the class."""
        guess = Counter(self.classes).most_common(1)[0][1] / len(self.classes)
        return (
            f"{self.found.verdict} On {len(self.classes)} images held out from training, captions name the "
            f"right class for **{self.right(self.before):.1%} before** and **{self.right(self.after):.1%} after**; the "
            f"most frequent class alone is right for {guess:.1%}."
        )

    def table(self, most: int = 12) -> str:
        """Return the first images with their captions as a table in HTML."""
        rows = []
        style = "height: 64px; max-width: none; image-rendering: pixelated"  # also where a page has rules for images
        for picture, *texts in zip(self.pictures[:most], self.classes, self.before, self.after, strict=False):
            picture.save(png := BytesIO(), "PNG")
            source = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
            cells = "".join(f"<td>{html.escape(text)}</td>" for text in texts)
            rows.append(f'<tr><td><img src="{source}" alt="" style="{style}"></td>{cells}</tr>')
        heads = "".join(f"<th>{head}</th>" for head in ("Image", "Class", "Before", "After"))
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def caption_of(name: str) -> str:
    """Return the caption for a class; its name may have several words."""
    return " ".join(["a picture of a", *name.split()])


@lru_cache
def captioner(name: str) -> hf_stitch.Adapter:
    """Train a small GPT-2 to write captions from the features of a vision transformer of the gallery."""
    backbone, seen = trained(name), pictures().split(UNSEEN, seed=0)[0]
    texts = [caption_of(class_name).split() for class_name in seen.label_names or ()]
    # Words of class names do not contain spaces, so they cannot equal a special token.
    special = {"pad_token": "no word", "bos_token": "first word", "eos_token": "last word"}
    words = dict.fromkeys([*special.values(), *(word for text in texts for word in text)])
    ids = {word: index for index, word in enumerate(words)}
    raw = Tokenizer(models.WordLevel(ids))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **special, clean_up_tokenization_spaces=False)
    rows = [torch.tensor([START, *map(ids.__getitem__, text), END]) for text in texts]
    captions = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(ids), n_embd=64, n_layer=2, n_head=4, n_positions=32 + captions.shape[1], bos_token_id=START,
        eos_token_id=END, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    both = VisionEncoderDecoderConfig.from_encoder_decoder_configs(backbone.model.config, config)
    model = VisionEncoderDecoderModel(both).eval()
    model.encoder.load_state_dict(
        backbone.model.vit.state_dict(), strict=False
    )  # the classifier does not have a pooler
    model.generation_config.update(
        decoder_start_token_id=START, eos_token_id=END, pad_token_id=PAD, max_new_tokens=captions.shape[1]
    )
    with torch.no_grad():
        features = torch.cat([model.encoder(**backbone.preprocess(batch.samples))[0] for batch in seen.batches(64)])
    labels = torch.tensor(seen.labels)
    optimizer = torch.optim.AdamW(model.decoder.parameters(), lr=3e-3)
    for _ in range(EPOCHS * LONGER):
        for batch in torch.randperm(len(labels)).split(32):
            tokens, next_tokens = captions[labels[batch], :-1], captions[labels[batch], 1:]
            logits = model(encoder_outputs=(features[batch],), decoder_input_ids=tokens).logits
            torch.nn.functional.cross_entropy(logits.mT, next_tokens, ignore_index=PAD).backward()
            optimizer.step()
            optimizer.zero_grad()
    processor = ImageAndTextProcessor(backbone.processor, tokenizer)
    return hf_stitch.load(model, processor=processor, context={"decoder_input_ids": [START]})


def describe(writer: str, encoder: str) -> Described:
    """Exchange the vision encoder of a captioner without labels, and return captions before and after.

    Args:
        writer: The vision transformer of the gallery that the captioner is trained on.
        encoder: The network of the gallery that becomes its vision encoder.

    Raises:
        Refused: If these are not networks of the gallery, or there are too few images.
    """
    if writer not in TRANSFORMERS or encoder not in SHIPPED:
        raise Refused(f"Choose one of {', '.join(TRANSFORMERS)}, and as new encoder one of {', '.join(SHIPPED)}.")
    if len(pictures()) < FEWEST:
        raise Refused(f"Captions require at least {FEWEST} images, but GALLERY_DATA has {len(pictures())}.")
    seen, unseen = pictures().split(UNSEEN, seed=0)
    # Folders are read class by class, and only the first images are shown.
    unseen = unseen.select(torch.randperm(len(unseen), generator=torch.Generator().manual_seed(0)).tolist())
    old, new = captioner(writer), trained(encoder)
    if encoder in TRANSFORMERS:
        new = hf_stitch.load(new.model.vit, processor=new.processor)
    options: dict[str, Any] = {"part": "vision", "data": unseen.unlabelled(), "progress": False}
    exchanged = _refusing(partial(hf_stitch.swap, old, new, seen.unlabelled(), **options))
    names = (f"the {name.replace(', ', ' of ')}" for name in (writer, encoder))
    exchanged = replace(exchanged, network=f"a captioner on {next(names)}", encoder=next(names))
    images = [image for batch in unseen.batches(64) for image in batch.samples]
    classes = [(unseen.label_names or ())[label] for label in unseen.labels or ()]
    before, after = (_captions(network, images, old) for network in (old, exchanged))
    return Described(exchanged, images, classes, before, after)


def _captions(
    network: hf_stitch.Adapter | Exchanged, images: Sequence[Pillow.Image], captioner: hf_stitch.Adapter
) -> list[str]:
    """Return the captions that a network writes, decoded by the tokenizer of the original captioner."""
    length = captioner.model.generation_config.max_new_tokens
    ids = network.model.generate(**network.preprocess(images), max_new_tokens=length, do_sample=False)
    return captioner.processor.tokenizer.batch_decode(ids, skip_special_tokens=True)


def downloads(results: Mapping[str, Any], saved: Any, folder: Path, name: str = "stitched") -> list[str]:
    """Write the report of named results, and a saved model as a zip; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.html"
    hf_stitch.report(list(results.values()), report, title=" · ".join(results))
    files = [str(report)]
    if saved is not None:
        with tempfile.TemporaryDirectory() as temporary:
            saved.save_pretrained(Path(temporary) / name)
            files.append(shutil.make_archive(str(folder / name), "zip", temporary))
    return files


def _within(limits: Limits, job: partial[Any]) -> Any:
    """Run a job if its plan is short enough.

    Raises:
        Refused: If the plan is too long, or the job raises an error about its input.
    """
    plan = _refusing(partial(hf_stitch.plan, job.func, *job.args, **job.keywords))
    if plan.seconds > limits.seconds:
        raise Refused(
            f"This would take {plan.seconds:.0f} s; the gallery accepts jobs of up to {limits.seconds:.0f} s. Choose "
            "smaller networks or fewer samples."
        )
    return _refusing(job)


def _refusing(job: Callable[[], Any]) -> Any:
    """Run a job, and convert its errors.

    Raises:
        Refused: If the job raises an error about its input.
    """
    try:
        return job()
    except (hf_stitch.NotACutError, ValueError) as error:
        raise Refused(str(error)) from error
