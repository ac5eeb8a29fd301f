"""Rows to match, shared by the tests of the matchers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from hf_stitch.statistics import Moments


class Rows(NamedTuple):
    """Paired rows in float64 and their moments."""

    x: np.ndarray
    y: np.ndarray

    @property
    def moments(self) -> Moments:
        return Moments(self.x.shape[1], self.y.shape[1]).update(torch.from_numpy(self.x), torch.from_numpy(self.y))

    @property
    def centred(self) -> tuple[np.ndarray, np.ndarray]:
        return self.x - self.x.mean(0), self.y - self.y.mean(0)

    @classmethod
    def draw(cls, n: int, dx: int, dy: int, *, mean: float = 2.0, noise: float = 0.5) -> Rows:
        """Affinely related rows with noise, their means ``mean`` standard deviations away."""
        g = np.random.default_rng(0)
        x, shift = g.standard_normal((n, dx)), g.standard_normal((2, dx + dy))
        y = x @ g.standard_normal((dx, dy)) / np.sqrt(dx) + noise * g.standard_normal((n, dy))
        return cls(x + mean * shift[0, :dx], y + mean * shift[1, dx:])


@pytest.fixture
def paired() -> type[Rows]:
    """The class, for tests that make rows of their own."""
    return Rows


@pytest.fixture(params=[(9, 9), (9, 5), (5, 9)], ids=["equal", "narrower", "wider"])
def rows(request: pytest.FixtureRequest) -> Rows:
    """300 rows, of equal and unequal widths."""
    return Rows.draw(300, *request.param)
