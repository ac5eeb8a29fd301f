"""Shared parts of the experiments: options, claims, and common page text."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import study

PAPER_TITLE = "Inner product-based neural network similarity (Chen, Miao & Qiu, NeurIPS 2023)"
DEMONSTRATION = (
    "A demonstration, not a reproduction: the available CIFAR-100 has 6,000 training and 4,000 test images of 100 "
    "classes, and its split is not the official one."
)
OPTIONS = ("data-dir", "published", "networks")
TRAINED = "--networks NETWORKS --data-dir DATA --out OUT"  # options of a script without published networks
write_results = partial(study.write_results, null=True)


def filled(
    script: str, rows: Sequence[dict[str, str]], options: str = f"--published PUBLISHED {TRAINED}", /, **figures: Any
) -> str:
    """Fill a page with the paper's title."""
    return study.filled(script, rows, options, title=PAPER_TITLE, demonstration=DEMONSTRATION, **figures)


def above(interval: study.Interval, bound: float) -> bool | None:
    """Return :func:`study.above`, and ``None`` for undefined figures of the record."""
    return None if None in interval.values() else study.above(interval, bound)
