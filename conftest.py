"""What all tests and doctests share, those of plugins too."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test begins with the same random numbers, whichever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
