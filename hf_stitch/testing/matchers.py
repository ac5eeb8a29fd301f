"""Conformance check for matchers."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from hf_stitch.matchers import ClosedFormMatcher, Matcher
from hf_stitch.registry import registries
from hf_stitch.statistics import Moments
from hf_stitch.stitches import Stitch
from hf_stitch.testing._require import require, require_error
from hf_stitch.testing.stitches import check_stitch

_ROWS = 200


def check_matcher(matcher: str | Matcher, **options: Any) -> None:
    """Check that a matcher satisfies the contract of ``Matcher``.

    The matcher is a frozen config that can be rebuilt from JSON. A closed-form matcher is also fitted to rows of widths
    12 to 12, 12 to 8 and 8 to 12. The same moments give the same stitch bit for bit and are not modified. Moments that
    are streamed in batches, merged in another order, or computed from reordered rows give the same stitch as moments of
    all rows at once, to 1e-10. Empty moments raise an error. ``fitted`` contains ``n`` and ``r2``, and the stitch
    passes ``check_stitch``.

    Args:
        matcher: Name in the registry of matchers, or a registered matcher.
        **options: Options of the matcher, if given by name.

    Raises:
        AssertionError: The contract is violated; the message names the violation.

    Example:
        >>> check_matcher("ridge", ridge=0.5)
    """
    built = registries.matchers.build(matcher, **options)
    _check_config(built)
    if isinstance(built, ClosedFormMatcher):
        for dx, dy in ((12, 12), (12, 8), (8, 12)):
            if dx == dy or built.unequal_widths:
                _check_fit(built, *_rows(dx, dy))
            else:
                _check_refused(built, Moments(dx, dy).update(*_rows(dx, dy)))


def _check_config(matcher: Matcher) -> None:
    described = json.loads(json.dumps(matcher.to_dict(), allow_nan=False))
    require(registries.matchers.build(described) == matcher, f"{described} must rebuild {matcher!r}")
    require(matcher.fits in ("moments", "task"), f"fits must be 'moments' or 'task', got {matcher.fits!r}")
    closed = isinstance(matcher, ClosedFormMatcher)
    require((matcher.fits == "moments") == closed, "fits must be 'moments' for a ClosedFormMatcher, and only for that")
    require_error(AttributeError, lambda: setattr(matcher, "name", "other"), "setting an attribute of a frozen config")


def _rows(dx: int, dy: int) -> tuple[Tensor, Tensor]:
    """Related float64 rows of x and y, with means several standard deviations from 0."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(_ROWS + dx, dx + dy, generator=generator, dtype=torch.float64)
    x = draw[:_ROWS, :dx] + 5
    return x, x @ draw[_ROWS:, dx:] + 0.3 * draw[:_ROWS, dx:] - 3


def _check_fit(matcher: ClosedFormMatcher, x: Tensor, y: Tensor) -> None:
    at_once = _moments_at_once(x, y)
    before = at_once.state_dict()
    stitch = matcher.fit(at_once, dtype=torch.float64)
    after = at_once.state_dict()
    require(all(torch.equal(before[key], after[key]) for key in before), "a fit must not modify the moments")
    _check_same(stitch, matcher.fit(at_once, dtype=torch.float64), x, "twice", tolerance=0.0)
    for route, moments in _moments_streamed(x, y).items():
        _check_same(stitch, matcher.fit(moments, dtype=torch.float64), x, route, tolerance=1e-10)
    found = stitch.fitted
    require(
        found.get("n") == len(x) and "r2" in found, f"fitted must contain 'r2' and the 'n' of {len(x)}, got {found}"
    )
    _check_refused(matcher, Moments(at_once.dx, at_once.dy))
    check_stitch(matcher.fit(at_once))


def _check_refused(matcher: ClosedFormMatcher, moments: Moments) -> None:
    require_error(ValueError, lambda: matcher.fit(moments), f"fitting {moments}")


def _moments_at_once(x: Tensor, y: Tensor) -> Moments:
    """Moments by definition, from all rows at once."""
    mean_x, mean_y = x.mean(0), y.mean(0)
    x, y = x - mean_x, y - mean_y
    return Moments.of(len(x), mean_x, mean_y, x.T @ x, y.T @ y, x.T @ y)


def _moments_streamed(x: Tensor, y: Tensor) -> dict[str, Moments]:
    """The same moments computed in three other ways."""
    sizes = [1, 80, 2, 117]
    batches = list(zip(torch.split(x, sizes), torch.split(y, sizes), strict=True))
    streamed, merged, shuffled = (Moments(x.shape[1], y.shape[1]) for _ in range(3))
    for batch in batches:
        streamed.update(*batch)
    for batch in reversed(batches):
        merged.merge(Moments(merged.dx, merged.dy).update(*batch))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    shuffled.update(x[order], y[order])
    return {"in batches": streamed, "merged backwards": merged, "in another order": shuffled}


@torch.no_grad()
def _check_same(stitch: Stitch, other: Stitch, x: Tensor, route: str, tolerance: float) -> None:
    expected, got = stitch(x), other(x)
    error = ((got - expected).abs().max() / expected.abs().max()).item()
    require(error <= tolerance, f"fitted to the same rows {route}, the stitch differs by {error:.1e} > {tolerance}")
