"""Shared parts of the experiments: arguments, presets and output."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
import study

Claim = partial(study.Claim, "2")
CHECK = "mechanism check, not a reproduction: the encoders are small and trained from scratch on the available data"


@dataclass(frozen=True)
class Preset:
    """Sizes and hyperparameters of an experiment. Numbers of samples are upper limits.

    Attributes:
        train: Number of samples for training heads.
        test: Number of test samples.
        anchors: Number of anchors.
        epochs: Training epochs of a head.
        batch: Batch size for training a head.
        learning_rate: Learning rate of a head.
        seeds: Number of seeds for heads and anchors.
        corpus: Number of samples for training local encoders.
        pretraining: Training epochs of local encoders.
    """

    train: int
    test: int
    anchors: int
    epochs: int
    batch: int
    learning_rate: float
    seeds: int
    corpus: int
    pretraining: int


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Format values as mean ± standard deviation."""
    series = pd.Series(values)
    return f"{series.mean():.{digits}f}" + (f" ± {series.std(ddof=1):.{digits}f}" if len(series) > 1 else "")
