"""Conformance checks for matchers and stitches."""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Iterator
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_stitch.matchers import ClosedFormMatcher, Matcher, RowsMatcher, TrainedMatcher, UnpairedMatcher
from hf_stitch.pairs import CollectedParts
from hf_stitch.registry import registries
from hf_stitch.representation import RepresentationSpec
from hf_stitch.statistics import Features, Moments
from hf_stitch.stitches import SequenceStitch, Stitch, as_linear
from hf_stitch_testing.kit import (
    Configuration,
    Kit,
    random,
    require,
    require_close,
    require_error,
    require_registered,
    skip_unless,
    transform,
    unchanged,
    unknown_invariances,
)
from hf_stitch_testing.parts import conformance

_ROWS = 200
_EQUAL, _UNEQUAL = ((12, 12),), ((12, 8), (8, 12))


@conformance
def check_matcher(matcher: str | Matcher, **options: Any) -> _MatcherKit:
    """Check that a matcher satisfies the laws of :class:`~hf_stitch.matchers.Matcher`; parts are named after laws.

    ``config`` also tests that the matcher is a frozen config that can be rebuilt from JSON. The remaining parts skip
    subclasses of ``TrainedMatcher``. They fit the matcher to rows of widths 12 to 12, 12 to 8 and 8 to 12, or to their
    moments, and matchers of unpaired rows to clustered rows with an orthogonal map.

    Args:
        matcher: Name in the registry of matchers, or a registered matcher.
        **options: Options of the matcher, if passed by name.

    Example:
        >>> check_matcher("ridge", ridge=0.5)
    """
    return _MatcherKit(registries.matchers, matcher, options)


class _MatcherKit(Configuration[Matcher]):
    def _cases(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._sides((*_EQUAL, *_UNEQUAL) if self.entry.unequal_widths else _EQUAL)

    def _sides(self, widths: tuple[tuple[int, int], ...]) -> Iterator[tuple[Tensor, Tensor]]:
        skip_unless(not isinstance(self.entry, TrainedMatcher), f"{self.entry.name} is trained through networks")
        draw_rows = _clustered_rows if isinstance(self.entry, UnpairedMatcher) else _related_rows
        return (draw_rows(*pair) for pair in widths)

    def _fit(self, x: Tensor, y: Tensor, moments: Moments | None = None, dtype: torch.dtype = torch.float64) -> Stitch:
        """Fit the matcher to rows or to their moments."""
        if isinstance(self.entry, ClosedFormMatcher):
            return self.entry.fit(moments or _moments_at_once(x, y), dtype=dtype)
        if isinstance(self.entry, UnpairedMatcher):
            pairs, middle = len(x) // 8, (len(x) + len(x) // 8) // 2
            return self.entry.fit(x[:pairs], y[:pairs], dtype=dtype, unpaired=(x[pairs:middle], y[middle:]))
        if isinstance(self.entry, RowsMatcher):
            return self.entry.fit(x, y, dtype=dtype)
        specs = RepresentationSpec("bd", x.shape[1]), RepresentationSpec("bd", y.shape[1])
        parts = CollectedParts(*specs, "none", {"body": Features().update(x, y)})
        return self.entry.match(parts).only.body.to(dtype)

    def config(self) -> None:
        super().config()
        allowed, collects = ("moments", "rows"), self.entry.collects
        require(collects in allowed, f"collects must be one of {allowed}, got {collects!r}")

    def pure(self, x: Tensor, y: Tensor) -> None:
        moments = _moments_at_once(x, y)
        with (
            unchanged("a fit must not modify the moments or the rows", lambda: (x, y, *moments.state_dict().values())),
            unchanged("a fit must use a separate random generator"),
        ):
            self._fit(x, y, moments)

    def repeatable(self, x: Tensor, y: Tensor) -> None:
        stitch = self._fit(x, y)
        torch.rand(1)
        _require_same(stitch, self._fit(x, y), x, "twice", tolerance=0.0)

    def streamed(self, x: Tensor, y: Tensor) -> None:
        skip_unless(isinstance(self.entry, ClosedFormMatcher), f"{self.entry.name} is not fitted to moments")
        for route, moments in _moments_streamed(x, y).items():
            _require_same(self._fit(x, y), self._fit(x, y, moments), x, route, tolerance=1e-10)

    def invariances(self, x: Tensor, y: Tensor) -> None:
        skip_unless(bool(self.entry.invariances), f"{self.entry.name} does not declare invariances")
        unknown_invariances(self.entry.invariances)
        mapped = self._fit(x, y)(x)
        for name, seed in product(self.entry.invariances, (0, 1)):
            new_x, new_y, new_mapped = (transform(rows, name, seed) for rows in (x, y, mapped))
            _require_near(self._fit(new_x, y)(new_x), mapped, f"with x transformed by {name}", 1e-7)
            _require_near(self._fit(x, new_y)(x), new_mapped, f"with y transformed by {name}", 1e-7)

    def repeated(self, x: Tensor, y: Tensor) -> None:
        skip_unless(not self.entry.counts_rows, f"{self.entry.name} declares that it depends on the number of rows")
        stitch = self._fit(torch.cat([x, x]), torch.cat([y, y]))
        _require_near(stitch(x), self._fit(x, y)(x), "to each row twice (otherwise set counts_rows = True)", 1e-7)

    def fitted(self, x: Tensor, y: Tensor) -> None:
        stitch, unpaired = self._fit(x, y), isinstance(self.entry, UnpairedMatcher)
        record = stitch.fitted
        is_complete = {"n", "r2"} <= record.keys() and (unpaired or record["n"] == len(x))
        require(is_complete, f"fitted must contain 'r2' and n={len(x)}, got {record}")
        if isinstance(self.entry, ClosedFormMatcher):
            r2 = 1 - ((stitch(x) - y).square().sum() / (y - y.mean(0)).square().sum()).item()
            require(math.isclose(float(record["r2"]), r2, abs_tol=1e-9), f"r2 must be {r2}, got {record['r2']}")

    def empty(self, x: Tensor, y: Tensor) -> None:
        self._require_refused(x[:0], y[:0])
        self._require_refused(x[:1], y[:1])

    def dead(self, x: Tensor, y: Tensor) -> None:
        for side, pair in (("x", (torch.full_like(x, 0.5), y)), ("y", (x, torch.full_like(y, 0.5)))):
            require_error(ValueError, partial(self._fit, *pair), f"fitting equal rows of {side}")

    def unpaired(self, x: Tensor, y: Tensor) -> None:
        matcher: Any = self.entry
        skip_unless(isinstance(matcher, UnpairedMatcher), f"{matcher.name} is fitted to pairs only")
        cosine = torch.cosine_similarity(self._fit(x, y)(x) + 3, y + 3).mean().item()
        require(cosine > 0.9, f"mapped rows must be near to their partners, got a mean cosine of {cosine:.2f}")
        if few := max(0, matcher.least_pairs - 1):
            rest = (x[few:], y[few:])
            require_error(ValueError, lambda: matcher.fit(x[:few], y[:few], unpaired=rest), f"fitting {few} pairs")

    def unequal_widths(self) -> None:
        sides = self._sides(_UNEQUAL)
        skip_unless(not self.entry.unequal_widths, f"{self.entry.name} supports unequal widths")
        for x, y in sides:
            self._require_refused(x, y)

    def stitch(self, x: Tensor, y: Tensor) -> None:
        check_stitch(self._fit(x, y, dtype=torch.float32))

    def _require_refused(self, x: Tensor, y: Tensor) -> None:
        case = f"fitting {len(x)} rows of widths {x.shape[1]} and {y.shape[1]}"
        require_error(ValueError, lambda: self._fit(x, y), case)


def _related_rows(dx: int, dy: int) -> tuple[Tensor, Tensor]:
    """Return related float64 rows of x and y, with means several standard deviations from 0."""
    numbers = random(_ROWS + dx, dx + dy)
    x = numbers[:_ROWS, :dx] + 5
    return x, x @ numbers[_ROWS:, dx:] + 0.3 * numbers[:_ROWS, dx:] - 3


def _clustered_rows(dx: int, dy: int) -> tuple[Tensor, Tensor]:
    """Return float64 rows in twelve clusters, and their image under an orthogonal map with different means."""
    generator, min_width = torch.Generator().manual_seed(0), min(dx, dy)
    centres = random(12, min_width, seed=generator)
    rows = centres[torch.randint(12, (4 * _ROWS,), generator=generator)]
    rows = rows + 0.2 * random(*rows.shape, seed=generator)
    x, y = (rows @ torch.linalg.qr(random(width, min_width, seed=generator)).Q.T for width in (dx, dy))
    return x + 5, y - 3


def _moments_at_once(x: Tensor, y: Tensor) -> Moments:
    """Compute moments by definition from all rows at once."""
    if not len(x):
        return Moments(x.shape[1], y.shape[1])
    mean_x, mean_y = x.mean(0), y.mean(0)
    x, y = x - mean_x, y - mean_y
    return Moments.of(len(x), mean_x, mean_y, x.T @ x, y.T @ y, x.T @ y)


def _moments_streamed(x: Tensor, y: Tensor) -> dict[str, Moments]:
    """Compute the moments in three ways: streamed, merged and shuffled."""
    sizes = [1, 80, 2, 117]
    batches = list(zip(torch.split(x, sizes), torch.split(y, sizes), strict=True))
    streamed, merged, shuffled = (Moments(x.shape[1], y.shape[1]) for _ in range(3))
    for batch in batches:
        streamed.update(*batch)
    for batch in reversed(batches):
        merged.merge(Moments(merged.dx, merged.dy).update(*batch))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    shuffled.update(x[order], y[order])
    return {"in batches": streamed, "merged backwards": merged, "shuffled": shuffled}


def _require_same(stitch: Stitch, refitted: Stitch, x: Tensor, route: str, tolerance: float) -> None:
    _require_near(refitted(x), stitch(x), f"to the same rows {route}", tolerance)


def _require_near(got: Tensor, expected: Tensor, route: str, tolerance: float) -> None:
    error = ((got - expected).abs().max() / expected.abs().max()).item()
    require(error <= tolerance, f"fitted {route}, the stitch differs by {error:.1e} > {tolerance}")


@conformance
def check_stitch(stitch: Stitch) -> _StitchKit:
    """Check that a stitch satisfies the laws of :class:`~hf_stitch.stitches.Stitch`; parts are named after laws.

    ``registered`` also tests that the registry of stitches has its class under its name. The stitch is not modified.

    Args:
        stitch: The stitch with fitted or loaded weights.

    Example:
        >>> from hf_stitch.stitches import LinearStitch
        >>> check_stitch(LinearStitch(3, 2))
    """
    return _StitchKit(stitch)


class _StitchKit(Kit):
    def __init__(self, stitch: Stitch) -> None:
        self._stitch = stitch

    def _cases(self) -> Iterator[tuple[Tensor]]:
        """Yield vectors of shape ``(2, 3, in_features)`` in the dtype and on the device of the stitch."""
        tensors = [*self._stitch.parameters(), *self._stitch.buffers()]
        dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
        x = torch.randn(2, 3, self._stitch.in_features, generator=torch.Generator().manual_seed(0))
        yield (x.to(tensors[0].device if tensors else "cpu", dtype),)

    @cached_property
    def in_float64(self) -> Any:
        """The stitch in float64."""
        return copy.deepcopy(self._stitch).double()

    def registered(self) -> None:
        require_registered(registries.stitches, self._stitch)

    def rebuilt(self, x: Tensor) -> None:
        description = json.loads(json.dumps(self._stitch.to_dict(), allow_nan=False))
        expected = self._stitch(x)
        for device in (x.device, torch.device("meta")):
            with device:
                rebuilt = Stitch.from_dict(description)
            rebuilt.load_state_dict(self._stitch.state_dict(), strict=True, assign=device.type == "meta")
            for name, tensor in [*rebuilt.named_parameters(), *rebuilt.named_buffers()]:
                require(not tensor.is_meta, f"{name} is not in the state dict: make it a persistent buffer")
            require(
                rebuilt.to_dict() == description,
                f"the record of a rebuilt stitch must be {description}, got {rebuilt.to_dict()}",
            )
            require(torch.equal(rebuilt(x), expected), f"a stitch rebuilt on {device} must have equal outputs")

    def saved(self, x: Tensor) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self._stitch.save(Path(folder, "new", "map.safetensors"))
            loaded = Stitch.load(Path(folder, "new", "map.safetensors"))
        same_type = type(loaded) is type(self._stitch)
        same = same_type and loaded.to_dict() == self._stitch.to_dict() and not loaded.training
        require(same and torch.equal(loaded(x), self._stitch(x)), "a saved and loaded stitch must have equal outputs")

    def shapes(self, x: Tensor) -> None:
        for inputs in (x, x[0], x[0, 0], x[:0]):
            shape, expected = self._stitch(inputs).shape, (*inputs.shape[:-1], self._stitch.out_features)
            require(shape == expected, f"output for shape {tuple(inputs.shape)} must be {expected}, got {tuple(shape)}")

    def dtypes(self, x: Tensor) -> None:
        dtype = self._stitch(x).dtype
        require(dtype == x.dtype, f"output for {x.dtype} must be {x.dtype}, got {dtype}")
        require(self.in_float64(x.double()).dtype == torch.float64, "cast to float64, it must compute in float64")

    def independent(self, x: Tensor) -> None:
        unit, inputs = ("sample", x) if isinstance(self._stitch, SequenceStitch) else ("vector", x.flatten(0, 1))
        inputs = inputs.double()
        separate = torch.stack([self.in_float64(single) for single in inputs])
        message = f"the output for a {unit} must not depend on the remaining {unit}s"
        require_close(self.in_float64(inputs), separate, message)

    def padding(self, x: Tensor) -> None:
        skip_unless(isinstance(self._stitch, SequenceStitch), f"{self._stitch.name} maps single positions")
        x = x.double()
        for mask in (torch.tensor([[True, True, False]]), torch.tensor([[False, True, True]])):
            mask = mask.expand(len(x), -1).to(x.device)
            outputs, changed = self.in_float64.map_sequence(x, mask)[mask], torch.where(mask[..., None], x, 7.0)
            message = "the output at real positions must not depend on values at masked positions"
            require_close(outputs, self.in_float64.map_sequence(changed, mask)[mask], message)
            unpadded = self.in_float64.map_sequence(x[:, mask[0]]).flatten(0, 1)
            require_close(outputs, unpadded, "the output at real positions must not change without masked positions")

    def causal(self, x: Tensor) -> None:
        declared = isinstance(self._stitch, SequenceStitch) and self._stitch.causal
        skip_unless(declared, f"{self._stitch.name} does not declare that it is causal")
        message = "the output at a position must not depend on later positions: set causal = False"
        require_close(self.in_float64(x.double())[:, :2], self.in_float64(x.double()[:, :2]), message)

    def affine(self, x: Tensor) -> None:
        skip_unless(self._stitch.affine, f"{self._stitch.name} does not declare that it is affine")
        first, second = x.double().split(1)
        mixed = torch.lerp(self.in_float64(first), self.in_float64(second), 0.3)
        middle = self.in_float64(torch.lerp(first, second, 0.3))
        require_close(middle, mixed, "the map is not affine: set affine = False")
        if hasattr(self.in_float64, "matrix"):
            linear = as_linear(self.in_float64)
            pointers = {tensor.data_ptr() for tensor in self.in_float64.state_dict().values()}
            is_copy = pointers.isdisjoint(weight.data_ptr() for weight in linear.parameters())
            require(is_copy, "as_linear must copy the weights")
            require_close(linear.double()(first), self.in_float64(first), "matrix() and bias must agree with the map")

    def gradients(self, x: Tensor) -> None:
        stitch = copy.deepcopy(self._stitch)
        with torch.enable_grad():
            outputs = stitch(x.requires_grad_())
            require(outputs.requires_grad, "the input must receive a gradient")
            outputs.square().sum().backward()
        for name, tensor in [("the input", x), *stitch.named_parameters()]:
            has_gradient = not tensor.requires_grad or (tensor.grad is not None and bool(tensor.grad.isfinite().all()))
            require(has_gradient, f"{name} must receive a finite gradient")

    def width(self, x: Tensor) -> None:
        width = self._stitch.in_features
        for shape in ((2, width + 1), (5, 2, width + 2), ()):
            call = partial(self._stitch, x.new_zeros(shape))
            require_error(ValueError, call, f"an input of shape {shape}", str(width))
