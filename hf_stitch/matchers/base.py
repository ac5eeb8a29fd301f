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
    """Stitching layers fitted by a matcher.

    Attributes:
        layers: Pair of layers -> stitching layer, in eval mode.
        undefined: Pair of layers -> error that makes the matcher undefined for it.

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
        """Layer of a single pair; raises the error if it is undefined."""
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
        read: Returns the input of ``fit`` for a pair of layers, by part of the stitching layer.
        fit: Fits a part; returns the map, and the mean of the target's rows.

    Example:
        >>> from hf_stitch.pairs import CollectedParts
        >>> from hf_stitch.representation import RepresentationSpec
        >>> x, spec = torch.randn(50, 3), RepresentationSpec("bd", 3)
        >>> collected = CollectedParts(spec, spec, "none", {"body": Moments(3, 3).update(x, 2 * x)})
        >>> double = LinearStitch.of(weight=2 * torch.eye(3), bias=torch.zeros(3))
        >>> match_each(collected, collected.moments, lambda moments: (double, moments.mean_y)).only.widths
        (3, 3)
    """
    layers: dict[Cell, StitchingLayer] = {}
    undefined: dict[Cell, Exception] = {}
    for cell in collected.cells:
        fit_inputs, specs = read(cell), collected.specs(cell)
        maps: dict[str, Stitch] = {}
        means: dict[str, Tensor] = {}
        try:
            for part, fit_input in fit_inputs.items():
                maps[part], means[part] = fit(fit_input)
        except ValueError as error:
            vectors = "positions" if collected.pooling == "none" else f"vectors (pooling {collected.pooling!r})"
            description = f"the map of {vectors}" if part == "body" else "the map of prefix tokens (CLS, distillation)"
            error_class = NoAlignmentError if isinstance(error, NoAlignmentError) else ValueError
            undefined[cell] = error_class(f"{description} from {specs[0]} to {specs[1]}: {error}")
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
    Derive from :class:`ClosedFormMatcher` or :class:`RowsMatcher` and implement ``fit``; for a matcher of another kind,
    derive from this class and implement :meth:`match`.

    Attributes:
        title: Name in text.
        papers: Papers that define the matcher.
        collects: Statistic that the matcher requires, for plans: ``"moments"`` or ``"rows"``.
        unplanned: Work that plans leave out, in words.
        unequal_widths: Whether the two representations may have different widths.
        invariances: Transformations that the map follows for all options: ``"orthogonal"`` and ``"invertible"`` maps,
            ``"scaling"`` by a positive number, ``"permutation"`` of the features, ``"translation"``.
        counts_rows: Whether duplicating all rows changes the map, because a penalty then weighs less.

    ``hf_stitch_testing.check_matcher`` checks these laws for every matcher, by name:

    - ``invariances``: a map of the source's rows changes W, but not the mapped rows; a map of the target's rows
      transforms the mapped rows likewise.
    - ``streamed``: moments of any batches, merged or in another order, give the stitch of all rows at once, to 1e-10.
    - ``repeated``: duplicating all rows does not change the stitch, unless ``counts_rows``.
    - ``repeatable``, ``pure``: equal rows give identical bits; rows, moments and shared generators do not change.
    - ``fitted``: ``n`` is the number of rows, and ``r2`` the R² of the map on these rows.
    - ``empty``, ``dead``, ``unequal_widths``: fewer than two rows, a side with all rows equal, and unsupported widths
      raise a ValueError.
    - ``unpaired``: a matcher of rows without partners finds an existing orthogonal map.
    - ``config``, ``stitch``: its record rebuilds it, and its stitches obey the laws of :class:`Stitch`.

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
        """Fit the stitching layers of all pairs of layers (:func:`match_each` builds them from maps).

        Args:
            collected: The activations of both networks, collected on first access.
            folder: Folder for the state of the matcher, to resume interrupted work; ``None`` to not store a state.
        """

    def check(self, pair: Pair, data: Split) -> None:
        """Raise a ValueError if the matcher cannot be used, before any network runs on the samples."""
        if task_named(pair.task).causal and getattr(self, "causal", None) is False:
            raise ValueError(
                f"matcher {self.name!r} requires causal=True for a language model, which predicts later tokens"
            )
        if data.unpaired is not None:
            raise ValueError(
                f"matcher {self.name!r} does not support unpaired; leave it out, or use 'seeded_refinement' or "
                "'unsupervised'"
            )

    def rehearse(self, pair: Pair, data: Split) -> None:
        """Run the steps special to the matcher on a few samples, to raise errors early."""

    def reads(self, data: Split) -> tuple[Samples, ...]:
        """Return the samples that the maps depend on, to recognise them in tests."""
        return (data.train.a,)

    def samples_trained(self, count: int) -> int:
        """Return the number of samples that training reads (with repetitions), for plans; 0 without training."""
        return 0

    def baselines(self, collected: Collected, layer: StitchingLayer) -> dict[str, StitchingLayer]:
        """Return baseline stitching layers for the fitted one, by name."""
        return {}


@dataclasses.dataclass(frozen=True)
class ClosedFormMatcher(Matcher):
    """Base class of matchers that compute the stitch from the moments of paired rows.

    Example:
        >>> from hf_stitch import registries
        >>> x, matcher = torch.randn(50, 3), registries.matchers.build("lstsq")
        >>> round(matcher.fit(Moments(3, 3).update(x, -x)).fitted["r2"], 6)
        1.0
    """

    @abstractmethod
    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> Stitch:
        """Fit the stitch that maps x rows to y rows, in float64 on the device of the moments.

        Its ``fitted`` contains ``n``, ``r2`` and results of the matcher.

        Args:
            moments: Moments of the source's rows (x) and the target's rows (y).
            dtype: Dtype of the weights. ``stitch.fitted["r2"]`` is computed with the weights in this dtype.

        Raises:
            torch.linalg.LinAlgError: A decomposition did not converge.
        """

    def match(self, collected: Collected, folder: Path | None = None) -> Matched:
        """Fit the moments of each part."""
        return match_each(collected, collected.moments, lambda moments: (self.fit(moments), moments.mean_y))

    def baselines(self, collected: Collected, layer: StitchingLayer) -> dict[str, StitchingLayer]:
        """Return a map of the target's token embedding alone, ``own``, if rows end with this embedding."""
        width = 0 if collected.pair is None else collected.pair.source.embedding_width
        if not width:
            return {}
        moments = collected.moments(collected.cells[0])["body"]
        last = slice(moments.sxx.shape[0] - width, None)
        embedding_moments = Moments.of(
            moments.n, moments.mean_x[last], moments.mean_y, moments.sxx[last, last], moments.syy, moments.sxy[last],
            moments.eps,
        )  # fmt: skip
        own_map = self.fit(embedding_moments)
        if not isinstance(own_map, LinearStitch):
            return {}
        weight = torch.zeros(own_map.out_features, layer.widths[0], dtype=own_map.weight.dtype)
        weight[:, last] = own_map.weight.detach()
        return {"own": layer.with_maps(LinearStitch.of(weight=weight, bias=own_map.bias), None)}


@dataclasses.dataclass(frozen=True)
class RowsMatcher(Matcher):
    """Base class of matchers that require the paired rows, for regions or gradient descent.

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
        """Check as the base class, and raise an error for several pairs of layers."""
        if len(pair.cells) > 1:
            raise ValueError(
                f"matcher {self.label!r} requires rows, but a grid stores only moments to save memory; stitch single "
                "pairs with hf_stitch.stitch"
            )
        super().check(pair, data)

    def match(self, collected: Collected, folder: Path | None = None) -> Matched:
        """Fit the rows of each part."""

        def fit(rows: Features) -> tuple[Stitch, Tensor]:
            return self.fit(rows.x, rows.y), rows.y.double().mean(0)

        return match_each(collected, collected.rows, fit)


class NoAlignmentError(ValueError):
    """Raised if the rows do not show that a map between the spaces exists."""


@dataclasses.dataclass(frozen=True)
class UnpairedMatcher(RowsMatcher):
    """Base class of matchers that also accept rows without known partners.

    Attributes:
        least_pairs: Smallest number of pairs. With 0, the matcher uses the rows of pairs as rows without partners.

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

        Its ``fitted`` contains ``n``, the number of pairs of the last fit (including pairs found by the matcher),
        ``r2`` on these pairs, and results of the matcher.
        """

    def check(self, pair: Pair, data: Split) -> None:
        """Check as other matchers of rows, and raise an error if required samples without partners are missing."""
        super().check(pair, dataclasses.replace(data, unpaired=None))
        if data.unpaired is None and self.least_pairs:
            raise ValueError(
                f"matcher {self.name!r} requires samples without partners; pass unpaired=(samples of the source, "
                "samples of the target)"
            )

    def rehearse(self, pair: Pair, data: Split) -> None:
        """Read one sample of each side without partners."""
        if data.unpaired is not None:
            few = (data.unpaired[0].take(1), data.unpaired[1].take(1))
            CollectedPair(pair, data.train, Run(progress=False), unpaired=few).unpaired(pair.cells[0])

    def reads(self, data: Split) -> tuple[Samples, ...]:
        """Return the samples without partners, and the paired samples if they are required."""
        unpaired = data.unpaired or ()
        return unpaired if unpaired and not self.least_pairs else (data.train.a, *unpaired)

    def match(self, collected: Collected, folder: Path | None = None) -> Matched:
        """Fit the rows with and without partners of each part; read pairs only if required."""
        unpaired = {cell: parts for cell in collected.cells if (parts := collected.unpaired(cell)) is not None}
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
        initial: Matcher that computes the initial stitches.

    Example:
        >>> from hf_stitch import registries
        >>> issubclass(registries.matchers.get("ridge"), TrainedMatcher)
        False
    """

    initial: ClosedFormMatcher | RowsMatcher

    @property
    def collects(self) -> Literal["moments", "rows"]:  # type: ignore[override]
        """Statistic that the initial matcher requires."""
        return self.initial.collects

    @property
    def unplanned(self) -> str:  # type: ignore[override]
        """Work of the initial matcher that plans leave out."""
        return self.initial.unplanned

    @abstractmethod
    def trained(self, collected: CollectedPair, layers: Mapping[Cell, StitchingLayer], folder: Path | None) -> Matched:
        """Train the stitching layers of all pairs of layers, starting from the initial stitching layers.

        Args:
            collected: The networks and the samples.
            layers: Pair of layers -> initial stitching layer.
            folder: Folder for the state of the training; ``None`` to not store a state.
        """

    def match(self, collected: Collected, folder: Path | None = None) -> Matched:
        """Fit the initial stitches, and train them."""
        if not isinstance(collected, CollectedPair):
            raise ValueError(
                f"matcher {self.name!r} requires samples for training, but a swap has only vectors; use "
                "hf_stitch.stitch"
            )
        initial = self.initial.match(collected)
        if not initial.layers:
            return initial
        final = self.trained(collected, initial.layers, folder)
        return Matched(final.layers, {**initial.undefined, **final.undefined})

    def check(self, pair: Pair, data: Split) -> None:
        """Check the initial matcher."""
        self.initial.check(pair, data)

    def rehearse(self, pair: Pair, data: Split) -> None:
        """Rehearse the initial matcher."""
        self.initial.rehearse(pair, data)

    def reads(self, data: Split) -> tuple[Samples, ...]:
        """Return the training samples and the samples of the initial matcher."""
        return tuple({id(samples): samples for samples in (data.train.a, *self.initial.reads(data))}.values())

    def baselines(self, collected: Collected, layer: StitchingLayer) -> dict[str, StitchingLayer]:
        """Return the baselines of the initial matcher."""
        return self.initial.baselines(collected, layer)
