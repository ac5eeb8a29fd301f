"""Conformance check for selections of anchors."""

from __future__ import annotations

import json
from typing import Any

import torch

from hf_stitch.data import Samples
from hf_stitch.registry import registries
from hf_stitch.relative import Selection, select_anchors
from hf_stitch.testing._require import require, require_error

SAMPLES, COUNT, WIDTH = 60, 12, 5


def check_selection(selection: str | Selection, **options: Any) -> None:
    """Check that a selection of anchors satisfies the contract of ``Selection``.

    The selection is a frozen config that can be rebuilt from JSON. It returns as many different samples as it should,
    the same ones each time, without changing the samples, the features or torch's random state. It needs what it
    declares, and nothing else.

    Args:
        selection: Name in the registry of anchors, or a registered selection.
        **options: Options of the selection, if given by name.

    Raises:
        AssertionError: The contract is violated; the message names the violation.

    Example:
        >>> check_selection("stratified", seed=1)
    """
    built = registries.anchors.build(selection, **options)
    described = json.loads(json.dumps({"name": built.name, **vars(built)}, allow_nan=False))
    require(registries.anchors.build(described) == built, f"{described} must rebuild {built!r}")
    require_error(AttributeError, lambda: setattr(built, "name", "other"), "setting an attribute of a frozen config")
    require(built.needs in ("labels", "features", None), f"needs must be labels, features or None, got {built.needs!r}")
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    rows = torch.randn(SAMPLES, 3, generator=generator)
    plain = Samples.of(rows)
    samples = Samples.of(rows, label=[place % 4 for place in range(SAMPLES)]) if built.needs == "labels" else plain
    given = {"features": features} if built.needs == "features" else {}
    before, state = features.clone(), torch.random.get_rng_state()
    for count in (1, COUNT, SAMPLES):
        chosen = select_anchors(samples, count, built, **given).ids
        require(len(chosen) == len(set(chosen)) == count, f"{count} different samples were asked for, got {chosen}")
        again = select_anchors(samples, count, built, **given).ids
        require(again == chosen, f"two selections of {count} samples differ")
    require(torch.equal(features, before), "the features must not be modified")
    require(torch.equal(state, torch.random.get_rng_state()), "selecting must not change torch's random state")
    if built.needs is not None:
        message = require_error(ValueError, lambda: select_anchors(plain, COUNT, built), f"missing {built.needs}")
        word = "labels" if built.needs == "labels" else "representations"
        require(word in message, f"the error on missing {built.needs} must name them: {message}")
