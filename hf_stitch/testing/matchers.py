"""Conformance check for matchers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor

from hf_stitch.matchers import ClosedFormMatcher, Matcher, RowsMatcher, TrainedMatcher, UnpairedMatcher
from hf_stitch.pairs import CollectedParts
from hf_stitch.registry import registries
from hf_stitch.representation import RepresentationSpec
from hf_stitch.statistics import Features, Moments
from hf_stitch.stitches import Stitch
from hf_stitch.testing._require import require, require_error, skip_unless
from hf_stitch.testing.conformance import conformance
from hf_stitch.testing.stitches import check_stitch

_ROWS = 200


@conformance
def check_matcher(matcher: str | Matcher, **options: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """Check that a matcher satisfies the contract of ``Matcher``.

    The parts; all but the first apply to closed-form matchers and to matchers of rows, which are fitted to rows of
    widths 12 to 12, 12 to 8 and 8 to 12, or to their moments:

    - ``config``: it is a frozen config that can be rebuilt from JSON, and ``collects`` is what plans know.
    - ``pure``: a fit does not modify the moments or the rows.
    - ``repeatable``: the same moments or rows give the same stitch bit for bit, whatever the global random state.
    - ``streamed``, for closed-form matchers: moments that are streamed in batches, merged in another order, or computed
      from reordered rows give the same stitch as moments of all rows at once, to 1e-10.
    - ``fitted``: ``fitted`` contains the number of rows ``n``, and ``r2``.
    - ``empty``: no rows, or moments of none, raise a ``ValueError``.
    - ``unpaired``, for matchers of rows without partners, of which all parts use rows in clusters with an orthogonal
      map: other rows of both sides give this map, and too few pairs raise a ``ValueError``.
    - ``unequal_widths``: so do unequal widths, if it needs equal ones.
    - ``stitch``: the stitch passes ``check_stitch``.

    Args:
        matcher: Name in the registry of matchers, or a registered matcher.
        **options: Options of the matcher, if given by name.

    Raises:
        AssertionError: The contract is violated; the message names the violation.

    Example:
        >>> check_matcher("ridge", ridge=0.5)
    """

    @cache
    def built() -> Matcher:
        return registries.matchers.build(matcher, **options)

    def of_fits(check: Callable[[Matcher, Tensor, Tensor], None], refused: bool = False) -> Callable[[], None]:
        def run() -> None:
            found = built()
            if isinstance(found, TrainedMatcher):
                raise SkipTest(f"{found.name} is trained through networks")
            skip_unless(not (refused and found.unequal_widths), f"{found.name} takes unequal widths")
            for dx, dy in ((12, 12), (12, 8), (8, 12)):
                if (dx == dy or found.unequal_widths) != refused:
                    check(found, *(_clustered if isinstance(found, UnpairedMatcher) else _rows)(dx, dy))

        return run

    yield "config", lambda: _check_config(built())
    yield "pure", of_fits(_check_pure)
    yield "repeatable", of_fits(_check_repeatable)
    yield "streamed", of_fits(_check_streamed)
    yield "fitted", of_fits(_check_fitted)
    yield "empty", of_fits(lambda found, x, y: _check_refused(found, x[:0], y[:0]))
    yield "unpaired", of_fits(_check_unpaired)
    yield "unequal_widths", of_fits(_check_refused, refused=True)
    yield "stitch", of_fits(lambda found, x, y: check_stitch(_fit(found, x, y, torch.float32)))


def _fit(matcher: Matcher, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float64) -> Stitch:
    """Fit a matcher to rows, or to their moments."""
    if isinstance(matcher, ClosedFormMatcher):
        return matcher.fit(_moments_at_once(x, y), dtype=dtype)
    if isinstance(matcher, UnpairedMatcher):
        pairs, rest = len(x) // 8, (len(x) + len(x) // 8) // 2
        return matcher.fit(x[:pairs], y[:pairs], dtype=dtype, unpaired=(x[pairs:rest], y[rest:]))
    if isinstance(matcher, RowsMatcher):
        return matcher.fit(x, y, dtype=dtype)
    specs = RepresentationSpec("bd", x.shape[1]), RepresentationSpec("bd", y.shape[1])
    collected = CollectedParts(*specs, "none", {"body": Features().update(x, y)})
    return matcher.match(collected).only.body.to(dtype)


def _check_config(matcher: Matcher) -> None:
    described = json.loads(json.dumps(matcher.to_dict(), allow_nan=False))
    require(registries.matchers.build(described) == matcher, f"{described} must rebuild {matcher!r}")
    known = ("moments", "rows")
    require(matcher.collects in known, f"collects must be one of {known}, got {matcher.collects!r}")
    require_error(AttributeError, lambda: setattr(matcher, "name", "other"), "setting an attribute of a frozen config")


def _rows(dx: int, dy: int) -> tuple[Tensor, Tensor]:
    """Related float64 rows of x and y, with means several standard deviations from 0."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(_ROWS + dx, dx + dy, generator=generator, dtype=torch.float64)
    x = draw[:_ROWS, :dx] + 5
    return x, x @ draw[_ROWS:, dx:] + 0.3 * draw[:_ROWS, dx:] - 3


def _clustered(dx: int, dy: int) -> tuple[Tensor, Tensor]:
    """Float64 rows in twelve clusters, and the same after an orthogonal map, with other means."""
    generator = torch.Generator().manual_seed(0)
    narrow = min(dx, dy)
    centres = torch.randn(12, narrow, generator=generator, dtype=torch.float64)
    rows = centres[torch.randint(12, (4 * _ROWS,), generator=generator)]
    rows = rows + 0.2 * torch.randn(rows.shape, generator=generator, dtype=torch.float64)
    turns = [torch.randn(width, narrow, generator=generator, dtype=torch.float64) for width in (dx, dy)]
    x, y = (rows @ torch.linalg.qr(turn).Q.T for turn in turns)
    return x + 5, y - 3


def _check_unpaired(matcher: Matcher, x: Tensor, y: Tensor) -> None:
    if not isinstance(matcher, UnpairedMatcher):
        raise SkipTest(f"{matcher.name} is fitted to pairs alone")
    with torch.no_grad():
        mapped = _fit(matcher, x, y)(x)
    cosine = torch.cosine_similarity(mapped + 3, y + 3).mean().item()
    require(cosine > 0.9, f"mapped rows must be near to their partners, got a mean cosine of {cosine:.2f}")
    few = max(0, matcher.least_pairs - 1)
    if few:
        rest = (x[few:], y[few:])
        require_error(ValueError, lambda: matcher.fit(x[:few], y[:few], unpaired=rest), f"fitting {few} pairs")


def _check_pure(matcher: Matcher, x: Tensor, y: Tensor) -> None:
    if isinstance(matcher, ClosedFormMatcher):
        moments = _moments_at_once(x, y)
        before = {key: value.clone() for key, value in moments.state_dict().items()}
        matcher.fit(moments, dtype=torch.float64)
        after = moments.state_dict()
        require(all(torch.equal(before[key], after[key]) for key in before), "a fit must not modify the moments")
    else:
        own = x.clone(), y.clone()
        _fit(matcher, *own)
        require(torch.equal(own[0], x) and torch.equal(own[1], y), "a fit must not modify the rows")


def _check_repeatable(matcher: Matcher, x: Tensor, y: Tensor) -> None:
    stitch = _fit(matcher, x, y)
    torch.rand(1)
    _check_same(stitch, _fit(matcher, x, y), x, "twice", tolerance=0.0)


def _check_streamed(matcher: Matcher, x: Tensor, y: Tensor) -> None:
    if not isinstance(matcher, ClosedFormMatcher):
        raise SkipTest(f"{matcher.name} is not fitted to moments")
    stitch = matcher.fit(_moments_at_once(x, y), dtype=torch.float64)
    for route, moments in _moments_streamed(x, y).items():
        _check_same(stitch, matcher.fit(moments, dtype=torch.float64), x, route, tolerance=1e-10)


def _check_fitted(matcher: Matcher, x: Tensor, y: Tensor) -> None:
    found = _fit(matcher, x, y).fitted
    if isinstance(matcher, UnpairedMatcher):
        require({"n", "r2"} <= found.keys(), f"fitted must contain 'n' and 'r2', got {found}")
        return
    right = found.get("n") == len(x) and "r2" in found
    require(right, f"fitted must contain 'r2' and the 'n' of {len(x)}, got {found}")


def _check_refused(matcher: Matcher, x: Tensor, y: Tensor) -> None:
    what = f"fitting {len(x)} rows of widths {x.shape[1]} and {y.shape[1]}"
    require_error(ValueError, lambda: _fit(matcher, x, y), what)


def _moments_at_once(x: Tensor, y: Tensor) -> Moments:
    """Moments by definition, from all rows at once."""
    if not len(x):
        return Moments(x.shape[1], y.shape[1])
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
