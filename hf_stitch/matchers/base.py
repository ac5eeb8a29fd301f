"""Base classes of matchers."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from hf_stitch.data import Samples
from hf_stitch.options import Configured
from hf_stitch.pairs import Cell, Collected, CollectedPair, Pair, Split
from hf_stitch.papers import Paper
from hf_stitch.running import Run
from hf_stitch.statistics import Features, Moments
from hf_stitch.stitches import LinearStitch, Stitch, StitchingLayer
from hf_stitch.tasks.heads import task_named

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Matched:
    """Stitching layers that a matcher has fitted.

    Attributes:
        layers: Pair of layers -> stitching layer, in eval mode.
        undefined: Pair of layers -> why the matcher is undefined for it.

    Example:
        >>> Matched({}, {("1", "2"): ValueError("too few samples")}).only
        Traceback (most recent call last):
        ...
        ValueError: too few samples
    """

    layers: Mapping[Cell, StitchingLayer]
    undefined: Mapping[Cell, Exception]

    @property
    def only(self) -> StitchingLayer:
        """The layer of a single pair; raises why there is none."""
        for error in self.undefined.values():
            raise error
        (layer,) = self.layers.values()
        return layer


def match_each(
    collected: Collected, read: Callable[[Cell], Mapping[str, T]], fit: Callable[[T], tuple[Stitch, Tensor]]
) -> Matched:
    """Fit the stitching layers of all pairs of layers part by part.

    A ValueError or LinAlgError of ``fit`` makes a pair of layers undefined.

    Args:
        collected: The activations.
        read: Returns what is fitted at a pair of layers, by part of the stitching layer.
        fit: Fits a part: the map, and the mean of the target's rows.

    Example:
        >>> from hf_stitch.pairs import CollectedParts
        >>> from hf_stitch.representation import RepresentationSpec
        >>> x, spec = torch.randn(50, 3), RepresentationSpec("bd", 3)
        >>> collected = CollectedParts(spec, spec, "none", {"body": Moments(3, 3).update(x, 2 * x)})
        >>> double = LinearStitch.of(weight=2 * torch.eye(3), bias=torch.zeros(3))
        >>> match_each(collected, collected.moments, lambda found: (double, found.mean_y)).only.widths
        (3, 3)
    """
    layers: dict[Cell, StitchingLayer] = {}
    undefined: dict[Cell, Exception] = {}
    for cell in collected.cells:
        found, specs = read(cell), collected.specs(cell)
        maps: dict[str, Stitch] = {}
        means: dict[str, Tensor] = {}
        try:
            for part, rows in found.items():
                maps[part], means[part] = fit(rows)
        except ValueError as error:
            vectors = "positions" if collected.pooling == "none" else f"vectors (pooling {collected.pooling!r})"
            what = f"the map of {vectors}" if part == "body" else "the map of prefix tokens (CLS, distillation)"
            kind = NoAlignmentError if isinstance(error, NoAlignmentError) else ValueError
            undefined[cell] = kind(f"{what} from {specs[0]} to {specs[1]}: {error}")
            undefined[cell].__cause__ = error
        except torch.linalg.LinAlgError as error:
            undefined[cell] = error
        else:
            layer = StitchingLayer(*specs, collected.pooling, maps["body"], maps.get("prefix"), means)
            layers[cell] = layer.eval()
    return Matched(layers, undefined)


@dataclasses.dataclass(frozen=True)
class Matcher(Configured, ABC):
    """Base class of matchers: frozen dataclasses that fit a stitch between two representations.

    The fields of a matcher are its options, checked against their annotations (:class:`hf_stitch.options.Configured`).
    Derive from :class:`ClosedFormMatcher` or :class:`RowsMatcher` and write ``fit``; or derive from this class and
    write :meth:`match` for a matcher of another kind, which then works in every job.

    Attributes:
        title: Name in text.
        papers: Papers that define the matcher.
        collects: What the matcher reads, for plans: ``"moments"`` or ``"rows"``.
        unplanned: What plans leave out, in words.
        unequal_widths: Whether the two representations may have different widths.
        invariances: Transformations that the map follows, whatever the options: ``"orthogonal"`` and ``"invertible"``
            maps, ``"scaling"`` by a positive number, ``"permutation"`` of the features, ``"translation"``.
        counts_rows: Whether the map changes if each row comes twice, because a penalty then weighs less.

    Laws, by the names of the parts of ``hf_stitch_testing.check_matcher``, which runs them on every matcher:

    - ``invariances``: a map of the source's rows turns W alone, and the mapped rows stay; a map of the target's rows
      moves the mapped rows alike.
    - ``streamed``: moments of any batches, merged or in another order, give the stitch of all rows at once, to 1e-10.
    - ``repeated``: each row twice changes nothing, unless the number of rows counts.
    - ``repeatable``, ``pure``: the same rows give the same bits; rows, moments and shared generators stay as they are.
    - ``fitted``: ``n`` is the number of rows, and ``r2`` that of these rows and the map.
    - ``empty``, ``dead``, ``unequal_widths``: fewer than two rows, a side whose rows are all equal, and widths that it
      does not take raise a ValueError.
    - ``unpaired``: rows without partners, of a matcher that takes them, give an orthogonal map that there is.
    - ``config``, ``stitch``: its record rebuilds it, and what it fits obeys the laws of :class:`Stitch`.

    Example:
        >>> from hf_stitch import registries
        >>> registries.matchers.build("ridge", ridge=0.5).to_dict()
        {'name': 'ridge', 'ridge': 0.5}
    """

    title: ClassVar[str]
    papers: ClassVar[tuple[Paper, ...]] = ()
    collects: ClassVar[Literal["moments", "rows"]] = "moments"
    unplanned: ClassVar[str] = ""
    unequal_widths: ClassVar[bool] = True
    invariances: ClassVar[tuple[str, ...]] = ()
    counts_rows: ClassVar[bool] = False

    @abstractmethod
    def match(self, collected: Collected, folder: Path | None = None) -> Matched:
        """Fit the stitching layers of all pairs of layers (:func:`match_each` makes them of maps).

        Args:
            collected: The activations of both networks, which are collected when they are asked for.
            folder: Folder for the state of the matcher, from which interrupted work resumes; ``None`` for no state.
        """

    def check(self, pair: Pair, data: Split) -> None:
        """Raise a ValueError, before any network runs on the samples, if the matcher cannot be used."""
        if task_named(pair.task).causal and getattr(self, "causal", None) is False:
            raise ValueError(
                f"matcher {self.name!r} reads later tokens, which a language model predicts: pass causal=True"
            )
        if data.unpaired is not None:
            raise ValueError(
                f"matcher {self.name!r} is fitted to pairs alone: leave out unpaired, or use 'seeded_refinement' or "
                "'unsupervised'"
            )

    def rehearse(self, pair: Pair, data: Split) -> None:
        """Run a few samples through what is special to the matcher, so that errors occur before all are read."""

    def reads(self, data: Split) -> tuple[Samples, ...]:
        """Return the samples on which the maps depend, to recognise them in tests."""
        return (data.train.a,)

    def samples_trained(self, count: int) -> int:
        """Return how many samples training reads, repeated ones included, for plans; 0 if nothing is trained."""
        return 0

    def baselines(self, collected: Collected, layer: StitchingLayer) -> dict[str, StitchingLayer]:
        """Return further stitching layers with which the fitted one is compared, by name."""
        return {}


@dataclasses.dataclass(frozen=True)
class ClosedFormMatcher(Matcher):
    """Base class of matchers whose stitch is computed from the moments of paired rows.

    Example:
        >>> from hf_stitch import registries
        >>> x, matcher = torch.randn(50, 3), registries.matchers.build("lstsq")
        >>> round(matcher.fit(Moments(3, 3).update(x, -x)).fitted["r2"], 6)
        1.0
    """

    @abstractmethod
    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> Stitch:
        """Fit the stitch that maps x rows to y rows; computed in float64 on the device of the moments, where it stays.

        Its ``fitted`` contains ``n``, ``r2`` and results of the matcher.

        Args:
            moments: Moments of the source's rows (x) and the target's rows (y).
            dtype: Dtype of the weights. ``stitch.fitted["r2"]`` is computed with the weights in this dtype.

        Raises:
            torch.linalg.LinAlgError: A decomposition did not converge.
        """

    def match(self, collected: Collected, folder: Path | None = None) -> Matched:
        """Fit the moments of each part."""
        return match_each(collected, collected.moments, lambda found: (self.fit(found), found.mean_y))

    def baselines(self, collected: Collected, layer: StitchingLayer) -> dict[str, StitchingLayer]:
        """Where rows end with the embedding of the target's token: a map of this embedding alone, ``own``."""
        width = 0 if collected.pair is None else collected.pair.source.embedding_width
        if not width:
            return {}
        found = collected.moments(collected.cells[0])["body"]
        last = slice(found.sxx.shape[0] - width, None)
        own = Moments.of(
            found.n, found.mean_x[last], found.mean_y, found.sxx[last, last], found.syy, found.sxy[last], found.eps
        )  # fmt: skip
        fitted = self.fit(own)
        if not isinstance(fitted, LinearStitch):
            return {}
        weight = torch.zeros(fitted.out_features, layer.widths[0], dtype=fitted.weight.dtype)
        weight[:, last] = fitted.weight.detach()
        return {"own": layer.with_maps(LinearStitch.of(weight=weight, bias=fitted.bias), None)}


@dataclasses.dataclass(frozen=True)
class RowsMatcher(Matcher):
    """Base class of matchers that need the paired rows themselves: their regions, or gradient descent on them.

    Example:
        >>> RowsMatcher.collects
        'rows'
    """

    collects: ClassVar[Literal["moments", "rows"]] = "rows"
    counts_rows: ClassVar[bool] = True

    @abstractmethod
    def fit(self, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float32) -> Stitch:
        """Fit the stitch that maps x rows to y rows, on the CPU.

        Its ``fitted`` contains ``n``, ``r2`` and results of the matcher.

        Args:
            x: ``(n, dx)`` floating point: the source's rows.
            y: ``(n, dy)`` floating point: the target's rows.
            dtype: Dtype of the weights.
        """

    def check(self, pair: Pair, data: Split) -> None:
        """Check as the base class does, and refuse several pairs of layers, whose rows take too much memory."""
        if len(pair.cells) > 1:
            raise ValueError(
                f"matcher {self.label!r} is fitted to rows, and a grid keeps moments only, since rows of all layers "
                "take too much memory: stitch single pairs with hf_stitch.stitch"
            )
        super().check(pair, data)

    def match(self, collected: Collected, folder: Path | None = None) -> Matched:
        """Fit the rows of each part."""

        def fit(found: Features) -> tuple[Stitch, Tensor]:
            return self.fit(found.x, found.y), found.y.double().mean(0)

        return match_each(collected, collected.rows, fit)


class NoAlignmentError(ValueError):
    """The rows give no evidence that one space can be mapped to the other; the message has the figures."""


@dataclasses.dataclass(frozen=True)
class UnpairedMatcher(RowsMatcher):
    """Base class of matchers of rows that also take rows of which nobody knows which belong together.

    Attributes:
        least_pairs: The least number of pairs. With 0, the matcher needs none, and takes the rows of pairs as further
            rows without partners.

    Example:
        >>> UnpairedMatcher.unplanned
        'the search for pairs'
    """

    least_pairs: ClassVar[int] = 0
    unplanned: ClassVar[str] = "the search for pairs"

    @abstractmethod
    def fit(
        self, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float32, *, unpaired: tuple[Tensor, Tensor] | None = None
    ) -> Stitch:
        """Fit the stitch, on the CPU.

        Its ``fitted`` contains ``n``, the number of pairs of the last fit, those that the matcher has found included,
        ``r2`` on these, and results of the matcher.
        """

    def check(self, pair: Pair, data: Split) -> None:
        """Check as other matchers of rows, and that there are samples without partners if they are needed."""
        super().check(pair, dataclasses.replace(data, unpaired=None))
        if data.unpaired is None and self.least_pairs:
            raise ValueError(
                f"matcher {self.name!r} needs samples without partners: unpaired=(samples of the source, samples of "
                "the target)"
            )

    def rehearse(self, pair: Pair, data: Split) -> None:
        """Read one sample of each side without partners."""
        if data.unpaired is not None:
            few = (data.unpaired[0].take(1), data.unpaired[1].take(1))
            CollectedPair(pair, data.train, Run(progress=False), unpaired=few).unpaired(pair.cells[0])

    def reads(self, data: Split) -> tuple[Samples, ...]:
        """Return the samples without partners, and those of the pairs if these are needed."""
        unpaired = data.unpaired or ()
        return unpaired if unpaired and not self.least_pairs else (data.train.a, *unpaired)

    def match(self, collected: Collected, folder: Path | None = None) -> Matched:
        """Fit the rows with and without partners of each part; pairs that are not needed are not read."""
        unpaired = {cell: found for cell in collected.cells if (found := collected.unpaired(cell)) is not None}
        if not unpaired:
            return super().match(collected, folder)

        def read(cell: Cell) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
            pairs = collected.rows(cell) if self.least_pairs else {}
            return {
                part: (pairs[part].x, pairs[part].y, u, v) if pairs else (u[:0], v[:0], u, v)
                for part, (u, v) in unpaired[cell].items()
            }

        def fit(rows: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Stitch, Tensor]:
            x, y, u, v = rows
            return self.fit(x, y, unpaired=(u, v)), torch.cat([y, v]).double().mean(0)

        return match_each(collected, read, fit)


@dataclasses.dataclass(frozen=True)
class TrainedMatcher(Matcher):
    """Base class of matchers that train stitches, initialised by another matcher.

    Attributes:
        initial: The matcher that computes the initial stitches.

    Example:
        >>> from hf_stitch import registries
        >>> issubclass(registries.matchers.get("ridge"), TrainedMatcher)
        False
    """

    initial: ClosedFormMatcher | RowsMatcher

    @property
    def collects(self) -> Literal["moments", "rows"]:  # type: ignore[override]
        """What the initial matcher reads."""
        return self.initial.collects

    @property
    def unplanned(self) -> str:  # type: ignore[override]
        """What plans leave out of the initial matcher."""
        return self.initial.unplanned

    @abstractmethod
    def trained(self, collected: CollectedPair, layers: Mapping[Cell, StitchingLayer], folder: Path | None) -> Matched:
        """Train the stitching layers of all pairs of layers, starting from those of the initial matcher.

        Args:
            collected: The networks and the samples.
            layers: Pair of layers -> initial stitching layer.
            folder: Folder for the state of the training; ``None`` for no state.
        """

    def match(self, collected: Collected, folder: Path | None = None) -> Matched:
        """Fit the initial stitches, and train them."""
        if not isinstance(collected, CollectedPair):
            raise ValueError(
                f"matcher {self.name!r} trains on samples, but here are only their vectors, as a swap does not train: "
                "use hf_stitch.stitch"
            )
        first = self.initial.match(collected)
        if not first.layers:
            return first
        found = self.trained(collected, first.layers, folder)
        return Matched(found.layers, {**first.undefined, **found.undefined})

    def check(self, pair: Pair, data: Split) -> None:
        """Check the initial matcher."""
        self.initial.check(pair, data)

    def rehearse(self, pair: Pair, data: Split) -> None:
        """Rehearse the initial matcher."""
        self.initial.rehearse(pair, data)

    def reads(self, data: Split) -> tuple[Samples, ...]:
        """Return the training samples, and those of the initial matcher."""
        return tuple({id(samples): samples for samples in (data.train.a, *self.initial.reads(data))}.values())

    def baselines(self, collected: Collected, layer: StitchingLayer) -> dict[str, StitchingLayer]:
        """Return those of the initial matcher."""
        return self.initial.baselines(collected, layer)
