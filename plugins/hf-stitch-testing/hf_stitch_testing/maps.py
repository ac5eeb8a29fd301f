"""Conformance checks for matchers and stitches."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_stitch.matchers import ClosedFormMatcher, Matcher, RowsMatcher, TrainedMatcher, UnpairedMatcher
from hf_stitch.pairs import CollectedParts
from hf_stitch.registry import registries
from hf_stitch.representation import RepresentationSpec
from hf_stitch.statistics import Features, Moments
from hf_stitch.stitches import SequenceStitch, Stitch
from hf_stitch_testing.kit import (
    Configuration,
    Kit,
    kept,
    random,
    require,
    require_close,
    require_error,
    require_registered,
    skip_unless,
)
from hf_stitch_testing.parts import conformance

_ROWS = 200
_EQUAL, _UNEQUAL = ((12, 12),), ((12, 8), (8, 12))


@conformance
def check_matcher(matcher: str | Matcher, **options: Any) -> _MatcherKit:
    """Check that a matcher satisfies the contract of ``Matcher``.

    The parts; all but the first apply to matchers that need no networks (all but subclasses of ``TrainedMatcher``),
    which are fitted to rows of widths 12 to 12, 12 to 8 and 8 to 12, or to their moments:

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

    Example:
        >>> check_matcher("ridge", ridge=0.5)
    """
    return _MatcherKit(registries.matchers, matcher, options)


class _MatcherKit(Configuration[Matcher]):
    def _cases(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._sides((*_EQUAL, *_UNEQUAL) if self.entry.unequal_widths else _EQUAL)

    def _sides(self, widths: tuple[tuple[int, int], ...]) -> Iterator[tuple[Tensor, Tensor]]:
        skip_unless(not isinstance(self.entry, TrainedMatcher), f"{self.entry.name} is trained through networks")
        return (_clustered(*each) if isinstance(self.entry, UnpairedMatcher) else _related(*each) for each in widths)

    def _fit(self, x: Tensor, y: Tensor, moments: Moments | None = None, dtype: torch.dtype = torch.float64) -> Stitch:
        """Fit the matcher to rows, or to their moments."""
        if isinstance(self.entry, ClosedFormMatcher):
            return self.entry.fit(moments or _moments_at_once(x, y), dtype=dtype)
        if isinstance(self.entry, UnpairedMatcher):
            pairs, rest = len(x) // 8, (len(x) + len(x) // 8) // 2
            return self.entry.fit(x[:pairs], y[:pairs], dtype=dtype, unpaired=(x[pairs:rest], y[rest:]))
        if isinstance(self.entry, RowsMatcher):
            return self.entry.fit(x, y, dtype=dtype)
        specs = RepresentationSpec("bd", x.shape[1]), RepresentationSpec("bd", y.shape[1])
        collected = CollectedParts(*specs, "none", {"body": Features().update(x, y)})
        return self.entry.match(collected).only.body.to(dtype)

    def config(self) -> None:
        super().config()
        known, collects = ("moments", "rows"), self.entry.collects
        require(collects in known, f"collects must be one of {known}, got {collects!r}")

    def pure(self, x: Tensor, y: Tensor) -> None:
        moments = _moments_at_once(x, y)
        with kept("a fit must not modify the moments or the rows", lambda: (x, y, *moments.state_dict().values())):
            self._fit(x, y, moments)

    def repeatable(self, x: Tensor, y: Tensor) -> None:
        stitch = self._fit(x, y)
        torch.rand(1)
        _require_same(stitch, self._fit(x, y), x, "twice", tolerance=0.0)

    def streamed(self, x: Tensor, y: Tensor) -> None:
        skip_unless(isinstance(self.entry, ClosedFormMatcher), f"{self.entry.name} is not fitted to moments")
        for route, moments in _moments_streamed(x, y).items():
            _require_same(self._fit(x, y), self._fit(x, y, moments), x, route, tolerance=1e-10)

    def fitted(self, x: Tensor, y: Tensor) -> None:
        found, unpaired = self._fit(x, y).fitted, isinstance(self.entry, UnpairedMatcher)
        right = {"n", "r2"} <= found.keys() and (unpaired or found["n"] == len(x))
        require(right, f"fitted must contain 'r2' and the 'n' of {len(x)}, got {found}")

    def empty(self, x: Tensor, y: Tensor) -> None:
        self._require_refused(x[:0], y[:0])

    def unpaired(self, x: Tensor, y: Tensor) -> None:
        matcher: Any = self.entry
        skip_unless(isinstance(matcher, UnpairedMatcher), f"{matcher.name} is fitted to pairs alone")
        cosine = torch.cosine_similarity(self._fit(x, y)(x) + 3, y + 3).mean().item()
        require(cosine > 0.9, f"mapped rows must be near to their partners, got a mean cosine of {cosine:.2f}")
        if few := max(0, matcher.least_pairs - 1):
            rest = (x[few:], y[few:])
            require_error(ValueError, lambda: matcher.fit(x[:few], y[:few], unpaired=rest), f"fitting {few} pairs")

    def unequal_widths(self) -> None:
        sides = self._sides(_UNEQUAL)
        skip_unless(not self.entry.unequal_widths, f"{self.entry.name} takes unequal widths")
        for x, y in sides:
            self._require_refused(x, y)

    def stitch(self, x: Tensor, y: Tensor) -> None:
        check_stitch(self._fit(x, y, dtype=torch.float32))

    def _require_refused(self, x: Tensor, y: Tensor) -> None:
        what = f"fitting {len(x)} rows of widths {x.shape[1]} and {y.shape[1]}"
        require_error(ValueError, lambda: self._fit(x, y), what)


def _related(dx: int, dy: int) -> tuple[Tensor, Tensor]:
    """Related float64 rows of x and y, with means several standard deviations from 0."""
    draw = random(_ROWS + dx, dx + dy)
    x = draw[:_ROWS, :dx] + 5
    return x, x @ draw[_ROWS:, dx:] + 0.3 * draw[:_ROWS, dx:] - 3


def _clustered(dx: int, dy: int) -> tuple[Tensor, Tensor]:
    """Float64 rows in twelve clusters, and the same after an orthogonal map, with other means."""
    generator, narrow = torch.Generator().manual_seed(0), min(dx, dy)
    centres = random(12, narrow, seed=generator)
    rows = centres[torch.randint(12, (4 * _ROWS,), generator=generator)]
    rows = rows + 0.2 * random(*rows.shape, seed=generator)
    x, y = (rows @ torch.linalg.qr(random(width, narrow, seed=generator)).Q.T for width in (dx, dy))
    return x + 5, y - 3


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


def _require_same(stitch: Stitch, other: Stitch, x: Tensor, route: str, tolerance: float) -> None:
    expected, got = stitch(x), other(x)
    error = ((got - expected).abs().max() / expected.abs().max()).item()
    require(error <= tolerance, f"fitted to the same rows {route}, the stitch differs by {error:.1e} > {tolerance}")


@conformance
def check_stitch(stitch: Stitch) -> _StitchKit:
    """Check that a stitch satisfies the contract of ``Stitch``; the stitch is not modified.

    The parts:

    - ``registered``: its name is that of its class in the registry of stitches.
    - ``rebuilt``: config and state dict rebuild it bit for bit, directly and on ``meta``.
    - ``shapes``: it accepts any leading dimensions, and no vectors at all.
    - ``dtypes``: it computes in its own dtype, and in float64 once it is cast.
    - ``independent``: it maps each vector independently; a :class:`~hf_stitch.stitches.SequenceStitch` each sample.
    - ``padding``: masked positions change no other position (sequence stitches).
    - ``causal``: no position changes an earlier one, if declared (sequence stitches).
    - ``affine``: it is an affine map, if declared.
    - ``gradients``: finite gradients reach its input and parameters.
    - ``width``: an input of a wrong width raises a ``ValueError`` that names the right one.

    Args:
        stitch: The stitch, with its weights fitted or loaded.

    Example:
        >>> from hf_stitch.stitches import LinearStitch
        >>> check_stitch(LinearStitch(3, 2))
    """
    return _StitchKit(stitch)


class _StitchKit(Kit):
    def __init__(self, given: Stitch) -> None:
        self.given = given

    def _cases(self) -> Iterator[tuple[Tensor]]:
        """Yield vectors of shape ``(2, 3, in_features)`` in the dtype and on the device of the stitch."""
        tensors = [*self.given.parameters(), *self.given.buffers()]
        dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
        x = torch.randn(2, 3, self.given.in_features, generator=torch.Generator().manual_seed(0))
        yield (x.to(tensors[0].device if tensors else "cpu", dtype),)

    @cached_property
    def exact(self) -> Any:
        """The stitch in float64."""
        return copy.deepcopy(self.given).double()

    def registered(self) -> None:
        require_registered(registries.stitches, self.given)

    def rebuilt(self, x: Tensor) -> None:
        description = json.loads(json.dumps(self.given.to_dict(), allow_nan=False))
        expected = self.given(x)
        for device in (x.device, torch.device("meta")):
            with device:
                twin = Stitch.from_dict(description)
            twin.load_state_dict(self.given.state_dict(), strict=True, assign=device.type == "meta")
            for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
                require(not tensor.is_meta, f"{name} is not in the state dict: make it a persistent buffer")
            require(twin.to_dict() == description, f"a twin describes itself as {twin.to_dict()}, not as {description}")
            require(torch.equal(twin(x), expected), f"a twin built on {device} and loaded maps to other values")

    def shapes(self, x: Tensor) -> None:
        for shaped in (x, x[0], x[0, 0], x[:0]):
            shape, right = self.given(shaped).shape, (*shaped.shape[:-1], self.given.out_features)
            require(shape == right, f"an input of shape {tuple(shaped.shape)} must give {right}, gave {tuple(shape)}")

    def dtypes(self, x: Tensor) -> None:
        found = self.given(x).dtype
        require(found == x.dtype, f"an input of {x.dtype} must give {x.dtype}, gave {found}")
        require(self.exact(x.double()).dtype == torch.float64, "cast to float64, it must compute in float64")

    def independent(self, x: Tensor) -> None:
        each, given = ("sample", x) if isinstance(self.given, SequenceStitch) else ("vector", x.flatten(0, 1))
        given = given.double()
        alone = torch.stack([self.exact(one) for one in given])
        require_close(self.exact(given), alone, f"the output for a {each} must not depend on the other {each}s")

    def padding(self, x: Tensor) -> None:
        skip_unless(isinstance(self.given, SequenceStitch), f"{self.given.name} looks at single positions")
        x = x.double()
        for mask in (torch.tensor([[True, True, False]]), torch.tensor([[False, True, True]])):
            mask = mask.expand(len(x), -1).to(x.device)
            real, other = self.exact.map_sequence(x, mask)[mask], torch.where(mask[..., None], x, 7.0)
            message = "the output at real positions must not depend on values at masked ones"
            require_close(real, self.exact.map_sequence(other, mask)[mask], message)
            short = self.exact.map_sequence(x[:, mask[0]]).flatten(0, 1)
            require_close(real, short, "the output at real positions must be that without the masked ones")

    def causal(self, x: Tensor) -> None:
        declared = isinstance(self.given, SequenceStitch) and self.given.causal
        skip_unless(declared, f"{self.given.name} does not declare that it is causal")
        message = "the output at a position must not depend on later ones: set causal = False"
        require_close(self.exact(x.double())[:, :2], self.exact(x.double()[:, :2]), message)

    def affine(self, x: Tensor) -> None:
        skip_unless(self.given.affine, f"{self.given.name} does not declare that it is affine")
        one, other = x.double().split(1)
        mixed = torch.lerp(self.exact(one), self.exact(other), 0.3)
        require_close(self.exact(torch.lerp(one, other, 0.3)), mixed, "the map is not affine: set affine = False")

    def gradients(self, x: Tensor) -> None:
        twin = copy.deepcopy(self.given)
        with torch.enable_grad():
            out = twin(x.requires_grad_())
            require(out.requires_grad, "no gradient reaches the input")
            out.square().sum().backward()
        for name, tensor in [("the input", x), *twin.named_parameters()]:
            reached = not tensor.requires_grad or (tensor.grad is not None and bool(tensor.grad.isfinite().all()))
            require(reached, f"no finite gradient reaches {name}")

    def width(self, x: Tensor) -> None:
        width = self.given.in_features
        wrong = x.new_zeros(2, width + 1)
        require_error(ValueError, lambda: self.given(wrong), f"an input of width {width + 1}", str(width))
