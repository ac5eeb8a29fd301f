"""What the gallery does, without its interface: networks, samples, comparison, stitch, answers, captions, downloads.

Networks of the gallery are small and are trained where it runs, in some seconds each, on handwritten digits or on the
pictures that ``GALLERY_DATA`` names. Networks of the Hub are loaded with the code of transformers and timm only.
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
"""Those that can be the vision encoder of a captioner from the start."""

DATA = os.environ.get("GALLERY_DATA", "sklearn:digits")
"""A folder with one subfolder of pictures for each class, or the Hub id of labelled pictures with a split ``train``."""

SAMPLES, EPOCHS, SIDE = 800, 6, 256
"""Pictures of the gallery, epochs for which a CNN is trained on them, and the longest side of a picture."""

LONGER = 5
"""How many times as many epochs transformers take."""

UNSEEN, FEWEST = 0.25, 43
"""Share of the pictures that trains no network of the gallery, and fewest pictures with which captions are tested."""

PAD, START, END = range(3)
"""Tokens of a captioner that are no words."""


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
        ValueError: If :data:`DATA` has no images of two or more classes.
    """
    read = hf_stitch.Samples.of(read_data(DATA, split="train"))
    if read.modality != "image" or not read.is_labelled or len(read) < 4 or (read.num_classes or 0) < 2:
        raise ValueError(f"GALLERY_DATA must name four or more images of two or more classes, got {read} from {DATA}")
    read = read.split(SAMPLES, seed=0)[1] if len(read) > SAMPLES else read
    images = [image.convert("RGB") for batch in read.batches(64) for image in batch.samples]
    for image in images:
        image.thumbnail((SIDE, SIDE))
    names = list(map(str, read.label_names or range(read.num_classes or 0)))
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    return hf_stitch.Samples.of(Dataset.from_dict({"image": images, "label": read.labels}, features=features))


@lru_cache
def trained(name: str) -> hf_stitch.Adapter:
    """Train one of :data:`SHIPPED`."""
    architecture, seed = SHIPPED[name]
    found = networks.build(architecture, seed, pictures())
    epochs = EPOCHS * (LONGER if architecture == "vit" else 1)
    for _ in networks.train(found, pictures().split(UNSEEN, seed=0)[0], epochs, seed):
        pass
    return found


@lru_cache(4)
def loaded(name: str) -> hf_stitch.Adapter:
    """Load a network of the Hub by its id, which runs no code of its repository."""
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
    """Return the layers of a network at which it can be cut, evenly spaced if there are many."""
    layers = list(network(name, limits).layers)
    if len(layers) <= limits.layers:
        return layers
    return [layers[round(i * (len(layers) - 1) / (limits.layers - 1))] for i in range(limits.layers)]


def layer(name: str, chosen: str | None) -> str:
    """Return the chosen layer of a network, or the one in the middle if the choice is a layer of another network."""
    found = cuts(name)
    return chosen if chosen in found else found[len(found) // 2]


def compare(a: str, b: str, data: hf_stitch.Samples, limits: Limits = LIMITS) -> hf_stitch.SimilarityAtlas:
    """Compare two networks by their names.

    Raises:
        Refused: If it would take too long, or the networks do not take such samples.
    """
    options: dict[str, Any] = {"layers_a": cuts(a, limits), "layers_b": cuts(b, limits), "progress": False}
    first, second = network(a, limits), network(b, limits)
    return _within(limits, partial(hf_stitch.compare, first, second, data, permutations=100, **options))


def stitch(
    a: str, b: str, source_layer: str, target_layer: str, data: hf_stitch.Samples, limits: Limits = LIMITS
) -> hf_stitch.StitchedModel:
    """Stitch two networks, by their names, by least squares, and score the result on held-out samples.

    Raises:
        Refused: If it would take too long, or the networks do not fit together.
    """
    options: dict[str, Any] = {"source_layer": source_layer, "target_layer": target_layer, "progress": False}
    source, target = network(a, limits), network(b, limits)
    return _within(limits, partial(hf_stitch.stitch, source, target, data, **options))


def verdict(evaluation: hf_stitch.analysis.Evaluation) -> str:
    """Say how good a stitched model is: its first figure beside those of target and baselines, and whether it tells."""
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


@dataclass(frozen=True)
class Described:
    """What a captioner writes about pictures that trained nothing, before and after its vision encoder is exchanged.

    Attributes:
        found: The exchanged captioner, and its scores against the original.
        pictures: The pictures.
        classes: Name of the class of each picture.
        before: Captions by the original.
        after: Captions by the exchanged captioner.
    """

    found: Exchanged
    pictures: Sequence[Pillow.Image]
    classes: Sequence[str]
    before: Sequence[str]
    after: Sequence[str]

    def right(self, captions: Sequence[str]) -> float:
        """Return the share of captions that name the class of their picture."""
        return sum(map(str.__eq__, captions, map(caption_of, self.classes))) / len(self.classes)

    def verdict(self) -> str:
        """Answer whether it is as good as before, and how often captions name the class."""
        guess = Counter(self.classes).most_common(1)[0][1] / len(self.classes)
        return (
            f"{self.found.verdict} Of {len(self.classes)} pictures that no network was trained on, captions name the "
            f"right class for **{self.right(self.before):.1%} before** and **{self.right(self.after):.1%} after**; the "
            f"most frequent class alone is right for {guess:.1%}."
        )

    def table(self, most: int = 12) -> str:
        """Return the first pictures with their captions as a table in HTML."""
        rows = []
        style = "height: 64px; max-width: none; image-rendering: pixelated"  # also where a page has rules for images
        for picture, *texts in zip(self.pictures[:most], self.classes, self.before, self.after, strict=False):
            picture.save(png := BytesIO(), "PNG")
            source = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
            cells = "".join(f"<td>{html.escape(text)}</td>" for text in texts)
            rows.append(f'<tr><td><img src="{source}" alt="" style="{style}"></td>{cells}</tr>')
        heads = "".join(f"<th>{head}</th>" for head in ("Picture", "Class", "Before", "After"))
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def caption_of(name: str) -> str:
    """Return the caption of a picture of a class, whose name has any number of words."""
    return " ".join(["a picture of a", *name.split()])


@lru_cache
def captioner(name: str) -> hf_stitch.Adapter:
    """Train a small GPT-2 to write captions of what a vision transformer of the gallery sees."""
    body, seen = trained(name), pictures().split(UNSEEN, seed=0)[0]
    texts = [caption_of(each).split() for each in seen.label_names or ()]
    # A word of a class has no space, so that none is taken for one of these.
    special = {"pad_token": "no word", "bos_token": "first word", "eos_token": "last word"}
    words = dict.fromkeys([*special.values(), *(word for text in texts for word in text)])
    ids = {word: place for place, word in enumerate(words)}
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
    both = VisionEncoderDecoderConfig.from_encoder_decoder_configs(body.model.config, config)
    model = VisionEncoderDecoderModel(both).eval()
    model.encoder.load_state_dict(body.model.vit.state_dict(), strict=False)  # the classifier has no pooler
    model.generation_config.update(
        decoder_start_token_id=START, eos_token_id=END, pad_token_id=PAD, max_new_tokens=captions.shape[1]
    )
    with torch.no_grad():
        features = torch.cat([model.encoder(**body.preprocess(batch.samples))[0] for batch in seen.batches(64)])
    labels = torch.tensor(seen.labels)
    optimizer = torch.optim.AdamW(model.decoder.parameters(), lr=3e-3)
    for _ in range(EPOCHS * LONGER):
        for batch in torch.randperm(len(labels)).split(32):
            read, wanted = captions[labels[batch], :-1], captions[labels[batch], 1:]
            logits = model(encoder_outputs=(features[batch],), decoder_input_ids=read).logits
            torch.nn.functional.cross_entropy(logits.mT, wanted, ignore_index=PAD).backward()
            optimizer.step()
            optimizer.zero_grad()
    processor = ImageAndTextProcessor(body.processor, tokenizer)
    return hf_stitch.load(model, processor=processor, context={"decoder_input_ids": [START]})


def describe(writer: str, encoder: str) -> Described:
    """Exchange the vision encoder of a captioner without labels, and let it describe pictures before and after.

    Args:
        writer: The vision transformer of the gallery on which the captioner is trained.
        encoder: The network of the gallery that becomes its vision encoder.

    Raises:
        Refused: If these are no networks of the gallery, or the pictures are too few.
    """
    if writer not in TRANSFORMERS or encoder not in SHIPPED:
        raise Refused(f"Choose one of {', '.join(TRANSFORMERS)}, and as new encoder one of {', '.join(SHIPPED)}.")
    if len(pictures()) < FEWEST:
        raise Refused(f"Captions need {FEWEST} pictures or more, and GALLERY_DATA has {len(pictures())}.")
    seen, unseen = pictures().split(UNSEEN, seed=0)
    # Folders come class by class, and only the first pictures are shown.
    unseen = unseen.select(torch.randperm(len(unseen), generator=torch.Generator().manual_seed(0)).tolist())
    old, new = captioner(writer), trained(encoder)
    if encoder in TRANSFORMERS:
        new = hf_stitch.load(new.model.vit, processor=new.processor)
    options: dict[str, Any] = {"part": "vision", "data": unseen.unlabelled(), "progress": False}
    found = _refusing(partial(hf_stitch.swap, old, new, seen.unlabelled(), **options))
    names = (f"the {name.replace(', ', ' of ')}" for name in (writer, encoder))
    found = replace(found, network=f"a captioner on {next(names)}", encoder=next(names))
    images = [image for batch in unseen.batches(64) for image in batch.samples]
    classes = [(unseen.label_names or ())[label] for label in unseen.labels or ()]
    return Described(
        found, images, classes, _written(old.model, old, images, old), _written(found.model, found, images, old)
    )


def _written(model: Any, reader: Any, images: Sequence[Pillow.Image], captioner: hf_stitch.Adapter) -> list[str]:
    """Return the captions that a network writes."""
    most = captioner.model.generation_config.max_new_tokens
    ids = model.generate(**reader.preprocess(images), max_new_tokens=most, do_sample=False)
    return captioner.processor.tokenizer.batch_decode(ids, skip_special_tokens=True)


def downloads(results: Mapping[str, Any], saved: Any, folder: Path, name: str = "stitched") -> list[str]:
    """Write the report of results, by name, and what has ``save_pretrained`` as a zip; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.html"
    hf_stitch.report(list(results.values()), report, title=" · ".join(results))
    files = [str(report)]
    if saved is not None:
        with tempfile.TemporaryDirectory() as place:
            saved.save_pretrained(Path(place) / name)
            files.append(shutil.make_archive(str(folder / name), "zip", place))
    return files


def _within(limits: Limits, job: partial[Any]) -> Any:
    """Run a job if its plan is short enough.

    Raises:
        Refused: If it is not, or if the job refuses its input.
    """
    planned = _refusing(partial(hf_stitch.plan, job.func, *job.args, **job.keywords))
    if planned.seconds > limits.seconds:
        raise Refused(
            f"This would take {planned.seconds:.0f} s; the gallery takes jobs of {limits.seconds:.0f} s. Choose "
            "smaller networks or fewer samples."
        )
    return _refusing(job)


def _refusing(job: Callable[[], Any]) -> Any:
    """Run a job.

    Raises:
        Refused: If it refuses its input.
    """
    try:
        return job()
    except (hf_stitch.NotACutError, ValueError) as error:
        raise Refused(str(error)) from error
