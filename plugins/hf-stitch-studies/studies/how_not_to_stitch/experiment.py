"""Shared parts of the studies of the fourth paper: arguments, images, its table 1, and claims."""

import argparse
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import study
from dr_frankenstein import images

import hf_stitch

claim, question = partial(study.Claim, "4"), partial(study.Claim, study.OWN)

TABLE_1 = {
    "PWCCA": (1.0, 0.125, 1.0, 0.0833),
    "Procrustes": (1.0, 0.1917, 1.0, 0.1833),
    "linear CKA": (1.0, 0.9611, 1.0, 0.3481),
    "task loss": (0.6375, 0.3528, 0.2417, 0.1),
    "lstsq, structural": (1.0, 0.925, 1.0, 0.2519),
    "lstsq, functional": (1.0, 0.6639, 1.0, 0.1185),
}
"""The paper's table 1: method -> share of identified layers within a network and between two, of ResNet-18, then of
ViT-Ti; of ten networks and 45 pairs of each."""
WELL, POORLY = 0.9, 0.5
"""Share of identified layers from which on a method does well, and below which it struggles."""
NAMES = {"Tiny10": "Tiny-10", "ResNet20": "ResNet-20", "VisionTransformer": "small ViT"}
NAMES |= {"tiny10": "Tiny-10", "resnet20": "ResNet-20", "vits": "small ViT"}
"""Class of networks, or name of their folder -> its name on pages."""


def parser(description: str | None, presets: Collection[str], **options: Any) -> argparse.ArgumentParser:
    """Create the parser of a study of several folders of networks, each of one architecture."""
    made = study.parser(description, "data-dir", presets=presets, **options)
    made.add_argument("--networks", type=Path, nargs="+", required=True, help="folders of trained networks")
    return made


def cifar(arguments: argparse.Namespace, train: int, test: int) -> tuple[hf_stitch.Samples, hf_stitch.Samples]:
    """Read training and test images of CIFAR-10."""
    read = partial(images.samples, "cifar10", data_dir=arguments.data_dir)
    return read("train", count=train), read("test", count=test)


def between(method: str, vit: bool = False) -> str:
    """Return the paper's share of layers that a method identifies between two networks."""
    return f"{TABLE_1[method][3 if vit else 1]:.2%}"


def pairs_of(count: int) -> str:
    """Return how many pairs some networks have, as text."""
    return "1 pair" if count == 2 else f"{count} networks, {count * (count - 1) // 2} pairs"


def footer(name: str, options: str = "--data-dir DATA --networks NETWORKS --out OUT") -> str:
    """Return the end of a page: the record and the command of the script of the same name."""
    return study.footer(name, f"how_not_to_stitch.{name}", options)


def folders(record: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the options of a study of several folders of networks."""
    return f"--preset {record['preset']['name']} --data-dir DATA --networks {' '.join(map(str.upper, names))} --out OUT"
