"""Paired rows, shared by the tests of the metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

ORACLES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("oracles.json").read_text())


def case(
    seed: int, n: int, p: int, q: int, shared: int, noise: float, mean: float = 0.0, decay: float = 0.0,
    scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The rows that the values in ``oracles.json`` belong to, from their recipe."""
    g = np.random.default_rng(seed)
    z = g.standard_normal((n, shared)) * np.exp(-decay * np.arange(shared))
    x = z @ g.standard_normal((shared, p)) + noise * g.standard_normal((n, p)) + mean * g.standard_normal(p)
    y = np.tanh(z) @ g.standard_normal((shared, q)) + noise * g.standard_normal((n, q)) + mean * g.standard_normal(q)
    return x * scale, y


def related(n: int, dx: int, dy: int, seed: int = 0, mean: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    return case(seed, n, dx, dy, shared=min(dx, dy), noise=0.5, mean=mean)


def centred(rows: np.ndarray) -> np.ndarray:
    return rows - rows.mean(0)
