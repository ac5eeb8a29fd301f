"""Swap in encoders of other architectures (Moschella et al. 2023, section 5.2), for texts (TREC) or images.

python examples/relative_representations/cross_architecture.py --modality text --data-dir DATA --cache CACHE
"""

import argparse

import diagnosis
import experiment
import image_encoders
import images
import pandas as pd
import swapping
import text_encoders
import texts
from encoders import Encoder
from experiment import CHECK, Preset
from swapping import ABSOLUTE, CENTRED, RELATIVE, TRUNCATED, Encoded

PRESETS = {
    ("text", "small"): Preset(6_000, 500, 500, 6, 128, 1e-3, 3, corpus=3_000, pretraining=2),
    ("images", "small"): Preset(5_000, 2_000, 500, 6, 128, 1e-3, 3, corpus=8_000, pretraining=6),
    ("text", "paper"): Preset(6_000, 500, 768, 5, 32, 1e-4, 5, corpus=1_000_000, pretraining=100),
    ("images", "paper"): Preset(50_000, 10_000, 768, 10, 32, 1e-4, 3, corpus=50_000, pretraining=100),
    **dict.fromkeys(
        [("text", "test"), ("images", "test")], Preset(150, 60, 20, 1, 32, 1e-3, 2, corpus=150, pretraining=1)
    ),
}  # fmt: skip
TUNING = {"small": 3, "test": 1, "paper": 10}
PAPER = {
    "TREC": {ABSOLUTE: ("91.7 ± 1.4", "21.5 ± 3.6"), RELATIVE: ("88.1 ± 1.4", "75.9 ± 5.4")},
    "cifar10": {},
    "cifar100": {ABSOLUTE: ("82.1 to 93.2", "6.2, else –"), RELATIVE: ("80.2 to 91.9", "76.8 to 84.3")},
}
"""Results of the paper, on its data and encoders. For images, only the rows that the paper prints."""
Found = tuple[str, str, dict[str, Encoded], pd.DataFrame]
"""Title, short name, vectors of the encoders, and scores."""
METHODS = (ABSOLUTE, RELATIVE, CENTRED, TRUNCATED, "ridge", "procrustes")


def main() -> None:
    """Run the experiment from the command line."""
    parser = experiment.with_encoders(experiment.parser(__doc__))
    parser.add_argument("--modality", choices=("text", "images"), required=True)
    arguments = parser.parse_args()
    preset = PRESETS[arguments.modality, arguments.preset]
    experiments = text if arguments.modality == "text" else of_images
    blocks = [f"**{CHECK}**"] if arguments.encoders == "local" else []
    record, pictures = {"preset": preset, "encoders": arguments.encoders}, {}
    for name, short, sides, found in experiments(arguments, preset):
        blocks += [f"{name}:", swapping.table(found, PAPER[short.partition("_")[0]]), swapping.by_pair(found, METHODS)]
        blocks += [diagnosis.shapes(sides), diagnosis.likeness(sides)]
        record[name] = found.to_dict("records")
        drawn = swapping.matrices(found, METHODS, name)
        pictures |= {f"{short}_{method.split()[-1]}": drawn[method] for method in (RELATIVE, CENTRED)}
    experiment.leave(f"cross_architecture_{arguments.modality}", "\n\n".join(blocks), record, pictures, arguments.out)


def text(arguments: argparse.Namespace, preset: Preset) -> list[Found]:
    """Run TREC with each kind of encoders."""
    train, test = (
        texts.trec(split, n, arguments.data_dir) for split, n in (("train", preset.train), ("test", preset.test))
    )
    found = []
    for kind, encoders in text_encoders_of(arguments, preset).items():
        encoded = {encoder.name: swapping.encoded(encoder, train, test, arguments.cache) for encoder in encoders}
        anchors = swapping.choices(train, encoded.values(), "stratified", preset)
        scores = swapping.exchange(encoded, anchors, preset, train.num_classes, paper_heads=(ABSOLUTE, RELATIVE))
        found.append((f"TREC, {kind}", f"TREC_{kind.split()[-1]}", encoded, scores))
    return found


def text_encoders_of(arguments: argparse.Namespace, preset: Preset) -> dict[str, list[Encoder]]:
    """Load encoders by kind: from the Hub, or trained here without and with fine-tuning on the classes."""
    package = [encoder for encoder in [text_encoders.installed()] if encoder is not None]
    if arguments.encoders == "hub":
        return {"pretrained encoders": [text_encoders.hub(name) for name in text_encoders.HUB] + package}
    tuning = TUNING[arguments.preset]
    return {
        "encoders of words": local_text_encoders(arguments, preset) + package,
        "encoders of words, tuned": local_text_encoders(arguments, preset, tuning),
    }


def local_text_encoders(arguments: argparse.Namespace, preset: Preset, tuning: int = 0) -> list[Encoder]:
    """Train or load one encoder of each family."""
    corpus = texts.english(preset.corpus, arguments.data_dir)
    labelled = texts.trec("train", preset.train, arguments.data_dir) if tuning else None
    recipes = (text_encoders.Recipe(family, preset.pretraining, tuning) for family in text_encoders.FAMILIES)
    return [text_encoders.local(recipe, corpus, arguments.cache, labelled) for recipe in recipes]


def of_images(arguments: argparse.Namespace, preset: Preset) -> list[Found]:
    """Run CIFAR-10 and the coarse classes of CIFAR-100."""
    if arguments.encoders == "hub":
        encoders = [image_encoders.hub(name) for name in image_encoders.HUB]
    else:
        corpus = images.read("cifar10", "train", preset.corpus, arguments.data_dir)
        recipes = (image_encoders.Recipe(family, preset.pretraining) for family in image_encoders.FAMILIES)
        encoders = [image_encoders.local(recipe, corpus, arguments.cache) for recipe in recipes]
    found = []
    for task in ("cifar10", "cifar100"):
        train, test = (
            images.read(task, split, n, arguments.data_dir)
            for split, n in (("train", preset.train), ("test", preset.test))
        )
        encoded = {encoder.name: swapping.encoded(encoder, train, test, arguments.cache) for encoder in encoders}
        anchors = swapping.choices(train, encoded.values(), "random", preset)
        found.append((task, task, encoded, swapping.exchange(encoded, anchors, preset, train.num_classes)))
    return found


if __name__ == "__main__":
    main()
