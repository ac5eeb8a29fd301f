"""Conformance check for selections of anchors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hf_stitch.data import Samples
from hf_stitch.registry import registries
from hf_stitch.relative import Selection, select_anchors
from hf_stitch.testing._require import require, require_error
from hf_stitch.testing.conformance import conformance

SAMPLES, COUNT, WIDTH = 60, 12, 5


@conformance
def check_selection(selection: str | Selection, **options: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """Check that a selection of anchors satisfies the contract of ``Selection``.

    The parts:

    - ``config``: it is a frozen config that can be rebuilt from JSON.
    - ``distinct``: it returns as many different samples as it should.
    - ``repeatable``: it returns the same ones each time.
    - ``pure``: it modifies neither the features nor torch's random state.
    - ``needs``: it names what it needs and does not get, and declares nothing else.

    Args:
        selection: Name in the registry of anchors, or a registered selection.
        **options: Options of the selection, if given by name.

    Raises:
        AssertionError: The contract is violated; the message names the violation.

    Example:
        >>> check_selection("stratified", seed=1)
    """

    @cache
    def built() -> Selection:
        return registries.anchors.build(selection, **options)

    yield "config", lambda: _check_config(built())
    yield "distinct", lambda: _check_distinct(built())
    yield "repeatable", lambda: _check_repeatable(built())
    yield "pure", lambda: _check_pure(built())
    yield "needs", lambda: _check_needs(built())


def _check_config(selection: Selection) -> None:
    described = json.loads(json.dumps({"name": selection.name, **vars(selection)}, allow_nan=False))
    require(registries.anchors.build(described) == selection, f"{described} must rebuild {selection!r}")
    require_error(
        AttributeError, lambda: setattr(selection, "name", "other"), "setting an attribute of a frozen config"
    )


def _samples(selection: Selection) -> tuple[Samples, dict[str, Tensor]]:
    """Return samples and, as far as the selection declares that it needs them, labels and features."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    rows = torch.randn(SAMPLES, 3, generator=generator)
    if selection.needs == "labels":
        return Samples.of(rows, label=[place % 4 for place in range(SAMPLES)]), {}
    return Samples.of(rows), {"features": features} if selection.needs == "features" else {}


def _check_distinct(selection: Selection) -> None:
    samples, given = _samples(selection)
    for count in (1, COUNT, SAMPLES):
        chosen = select_anchors(samples, count, selection, **given).ids
        require(len(chosen) == len(set(chosen)) == count, f"{count} different samples were asked for, got {chosen}")


def _check_repeatable(selection: Selection) -> None:
    samples, given = _samples(selection)
    for count in (1, COUNT, SAMPLES):
        chosen, again = (select_anchors(samples, count, selection, **given).ids for _ in range(2))
        require(again == chosen, f"two selections of {count} samples differ")


def _check_pure(selection: Selection) -> None:
    samples, given = _samples(selection)
    before, state = {name: rows.clone() for name, rows in given.items()}, torch.random.get_rng_state()
    for count in (1, COUNT, SAMPLES):
        select_anchors(samples, count, selection, **given)
    require(all(torch.equal(rows, given[name]) for name, rows in before.items()), "the features must not be modified")
    require(torch.equal(state, torch.random.get_rng_state()), "selecting must not change torch's random state")


def _check_needs(selection: Selection) -> None:
    needs = selection.needs
    require(needs in ("labels", "features", None), f"needs must be labels, features or None, got {needs!r}")
    plain = Samples.of(torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0)))
    if needs is not None:
        message = require_error(ValueError, lambda: select_anchors(plain, COUNT, selection), f"missing {needs}")
        word = "labels" if needs == "labels" else "representations"
        require(word in message, f"the error on missing {needs} must name them: {message}")
