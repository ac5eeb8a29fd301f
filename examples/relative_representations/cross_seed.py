"""Swap in encoders of other seeds (Moschella et al. 2023, section 3).

Three ResNets that differ only in their seed are trained on CIFAR-10. Heads are trained on the features of one of them,
on CIFAR-10 and on a new task, the 20 coarse classes of CIFAR-100. Then the other two encoders replace it.

    python examples/relative_representations/cross_seed.py --data-dir DATA --cache CACHE --out OUT
"""

import argparse

import experiment
import image_encoders
import images
import swapping
from encoders import Encoder
from experiment import CHECK, Preset

PRESETS = {
    "small": Preset(5_000, 2_000, 500, 6, 128, 1e-3, 3, corpus=8_000, pretraining=6),
    "test": Preset(150, 60, 20, 1, 32, 1e-3, 2, corpus=150, pretraining=1),
    "paper": Preset(50_000, 10_000, 768, 10, 32, 1e-4, 3, corpus=50_000, pretraining=100),
}
TASKS = ("cifar10", "cifar100")


def encoders_of(arguments: argparse.Namespace, preset: Preset) -> list[Encoder]:
    """Train or load three seeds of a ResNet on CIFAR-10."""
    corpus = images.read("cifar10", "train", preset.corpus, arguments.data_dir)
    recipes = (image_encoders.Recipe("resnet", preset.pretraining, seed) for seed in range(3))
    return [image_encoders.local(recipe, corpus, arguments.cache, f"seed {recipe.seed}") for recipe in recipes]


def main() -> None:
    """Run the experiment from the command line."""
    arguments = experiment.parser(__doc__).parse_args()
    preset = PRESETS[arguments.preset]
    encoders = encoders_of(arguments, preset)
    text, record, pictures = [f"**{CHECK}**"], {"preset": preset}, {}
    for task in TASKS:
        train, test = (
            images.read(task, split, n, arguments.data_dir)
            for split, n in (("train", preset.train), ("test", preset.test))
        )
        encoded = {encoder.name: swapping.encoded(encoder, train, test, arguments.cache) for encoder in encoders}
        found = swapping.exchange(
            encoded, swapping.choices(train, encoded.values(), "random", preset), preset, train.num_classes
        )
        text += [f"Head on {task}:", swapping.table(found)]
        record[task] = found.to_dict("records")
        pictures |= {f"cross_seed_{task}": swapping.matrices(found, (swapping.RELATIVE,), task)[swapping.RELATIVE]}
    experiment.leave("cross_seed", "\n\n".join(text), record, pictures, arguments.out)


if __name__ == "__main__":
    main()
