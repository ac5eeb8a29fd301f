"""Shared parts of the studies of the fourth paper: arguments, images, its table 1, and claims."""

import argparse
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import study
from dr_frankenstein import images, networks

from hf_stitch import Adapter, Samples

PUBLISHED = tomllib.loads(Path(__file__).with_name("published.toml").read_text())
"""Figures of the paper's tables."""
WELL, POORLY = 0.9, 0.5
"""From the first share of identified layers, a method does well; below the second, it struggles."""
NAMES = {"Tiny10": "Tiny-10", "ResNet20": "ResNet-20", "VisionTransformer": "small ViT"}
NAMES |= {"tiny10": "Tiny-10", "resnet20": "ResNet-20", "vits": "small ViT"}
"""Class or folder of networks -> name on pages."""


def parser(description: str | None, **options: Any) -> argparse.ArgumentParser:
    """Create the parser of a study on several folders of networks, one architecture each."""
    built = study.parser(description, "data-dir", **options)
    built.add_argument("--networks", type=Path, nargs="+", required=True, help="folders of trained networks")
    return built


def cifar(arguments: argparse.Namespace, train: int, test: int) -> tuple[Samples, Samples]:
    read = partial(images.samples, "cifar10", data_dir=arguments.data_dir)
    return read("train", count=train), read("test", count=test)


def kinds(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Adapter], tuple[str, ...]]]:
    """Load the networks of each folder: name of their class, networks, and layers."""
    for folder in arguments.networks:
        loaded, layers = networks.read_folder(folder)
        yield type(next(iter(loaded.values())).model).__name__, loaded, layers


def between(method: str, vit: bool = False) -> str:
    """Format the paper's share of layers that a method identifies between two networks, if available."""
    shares = PUBLISHED["table 1"].get(method)
    return f"{shares[vit]:.2%}" if shares else "–"


def paired(names: list[str], count: int) -> list[tuple[str, str]]:
    """Return disjoint pairs of networks."""
    return [(names[i], names[i + 1]) for i in range(0, 2 * count, 2)]


def pairs_of(count: int) -> str:
    """Format the number of pairs of ``count`` networks."""
    return "1 pair" if count == 2 else f"{count} networks, {count * (count - 1) // 2} pairs"


def filled(
    script: str, rows: Iterable[Mapping[str, str]], folders: Iterable[str] = ("networks",), **figures: Any
) -> str:
    """Fill a page, with folders of networks in its command."""
    options = f"--data-dir DATA --networks {' '.join(map(str.upper, folders))} --out OUT"
    return study.filled(script, rows, options, **figures)
