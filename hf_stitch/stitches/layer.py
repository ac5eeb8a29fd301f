"""The stitching layer: maps representations of a source layer to representations of a target layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch.options import checked
from hf_stitch.representation import Pooling, Representation, RepresentationSpec
from hf_stitch.stitches.base import Stitch
from hf_stitch.stitches.linear import IdentityStitch, LinearStitch
from hf_stitch.stitches.sequence import SequenceStitch

POOLED = ("mean", "cls", "last")  # poolings to one vector with the width of a position
Pairs = dict[str, tuple[Tensor, Tensor]]  # part of a stitching layer -> rows of source and target


class StitchingLayer(nn.Module):
    """Module that maps representations of one spec to another spec (Csiszárik et al. 2021, section 3).

    The layer resamples positions to the grid of the target (bilinear), maps each position by ``body``, and arranges the
    result in the layout of the target. Prefix tokens of the target (CLS, distillation) are not positions. A separate
    map, ``prefix``, computes all of them from the prefix tokens of the source, or from the mean of its positions if the
    source does not have prefix tokens.

    The pooling defines the vectors that ``body`` maps: every position (``none``), the concatenated positions of a
    sample (``flatten``), or one vector per sample (``mean``, ``cls``, ``last``). With one vector per sample, the target
    receives a single token, or a grid with one position.

    The input must have the layout, width and prefix tokens of the source spec; other inputs raise a ``ValueError``. The
    output has the target spec, the mask of positions, and no context.

    Args:
        source: Spec of the input.
        target: Spec of the output.
        pooling: The pooling.
        body: Map of positions, with the input and output widths :attr:`widths`.
        prefix: Map of prefix tokens, with the widths :attr:`prefix_widths`; None for a target without prefix tokens.
        means: Mean of the target's rows by part (``body``, ``prefix``), for the mean baseline. Default: zeros.

    Example:
        >>> import torch
        >>> grid, tokens = RepresentationSpec("bchw", 8, (4, 4)), RepresentationSpec("bnd", 6, (2, 2), prefix_tokens=1)
        >>> layer = StitchingLayer(grid, tokens, "none", LinearStitch(8, 6), LinearStitch(8, 6))
        >>> layer(Representation(torch.randn(3, 8, 4, 4), "bchw")).values.shape
        torch.Size([3, 5, 6])
    """

    @checked
    def __init__(
        self, source: RepresentationSpec, target: RepresentationSpec, pooling: Pooling, body: Stitch,
        prefix: Stitch | None = None, means: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Validate the specs and the widths of the maps."""
        super().__init__()
        check_specs(source, target, pooling)
        self.source, self.target, self.pooling = source, target, pooling
        self.body, self.prefix = body, prefix
        for part, stitch, widths in (("body", body, self.widths), ("prefix", prefix, self.prefix_widths)):
            if (stitch is None) != (widths is None) or (stitch and (stitch.in_features, stitch.out_features) != widths):
                actual = "none" if stitch is None else f"{stitch.in_features} -> {stitch.out_features}"
                expected = "none" if widths is None else f"{widths[0]} -> {widths[1]}"
                raise ValueError(
                    f"the {part} of a stitch from {source} to {target} ({pooling}) must map {expected}, got {actual}"
                )
        for part in self.parts:
            mean = (means or {}).get(part)
            width = getattr(self, part).out_features
            self.register_buffer(f"{part}_mean", torch.zeros(width) if mean is None else mean.detach().float())

    # -- widths and parts --------------------------------------------------------------------------------------------
    @property
    def widths(self) -> tuple[int, int]:
        """Input and output width of ``body``."""
        return part_widths(self.source, self.target, self.pooling)["body"]

    @property
    def prefix_widths(self) -> tuple[int, int] | None:
        """Input and output width of ``prefix``; None for a target without prefix tokens."""
        return part_widths(self.source, self.target, self.pooling).get("prefix")

    @property
    def parts(self) -> tuple[str, ...]:
        """``("body",)``, or ``("body", "prefix")`` with a map of prefix tokens."""
        return ("body",) if self.prefix is None else ("body", "prefix")

    # -- forward ----------------------------------------------------------------------------------------------------
    def __call__(self, representation: Representation) -> Representation:
        """Map a source representation to a target representation, with the mask of positions and without context."""
        got, spec = representation.spec, self.target
        if (got.layout, got.width, got.prefix_tokens) != (
            self.source.layout,
            self.source.width,
            self.source.prefix_tokens,
        ):
            raise ValueError(f"the stitching layer requires a representation of spec {self.source}, got {got}")
        mask, grid = representation.mask, representation.grid
        layout = {"mask": mask, "grid": grid, "padding_unknown": representation.padding_unknown}
        mapped: Tensor = super().__call__(representation.values, **layout)
        if spec.layout != "bnd":
            return Representation(mapped, spec.layout)
        mask = None if mask is None else mask.to(mapped.device)
        if self.pooling in POOLED:
            mask = None if spec.grid is not None else mapped.new_ones(mapped.shape[:2], dtype=torch.bool)
        elif mask is not None and got.prefix_tokens != spec.prefix_tokens:
            mask = functional.pad(mask[:, got.prefix_tokens :], (spec.prefix_tokens, 0), value=True)
        pooled = self.pooling in POOLED
        return Representation(
            mapped,
            "bnd",
            mask=mask,
            prefix_tokens=0 if pooled else spec.prefix_tokens,
            grid=None if pooled else spec.grid,
        )

    def forward(
        self, values: Tensor, *, mask: Tensor | None, grid: tuple[int, int] | None, padding_unknown: bool
    ) -> Tensor:
        """Map the values of a representation. Hooks of this module receive these values.

        Args:
            values: The values, in the layout of the source.
            mask: For texts: (batch, tokens) bool, true for real tokens.
            grid: Height and width of the grid of positions.
            padding_unknown: Whether there are padding positions at unknown places.
        """
        source, spec = self.source, self.target
        representation = Representation(
            values, source.layout, mask, source.prefix_tokens, grid, padding_unknown=padding_unknown
        )
        mapped = self._map_positions(representation)
        if spec.layout == "bd":
            return mapped
        if self.pooling == "flatten":
            mapped = mapped.unflatten(1, (-1, spec.width))
        elif self.pooling in POOLED:
            mapped = mapped[:, None]
        if spec.layout != "bnd":
            assert spec.grid is not None
            grid_values = mapped.reshape(
                values.shape[0], *((1, 1) if self.pooling in POOLED else spec.grid), spec.width
            )
            return grid_values if spec.layout == "bhwc" else grid_values.permute(0, 3, 1, 2).contiguous()
        if self.prefix is None:
            return mapped
        tokens = self._map("prefix", source_prefix(representation)).unflatten(1, (spec.prefix_tokens, spec.width))
        return torch.cat([tokens, mapped], 1)

    def _map_positions(self, representation: Representation) -> Tensor:
        grid = self.target.grid
        source_grid = representation.grid
        # Interpolation weights add up to 1, so an affine map may come first, on fewer positions. A PEFT layer may too:
        # it replaces an affine map.
        if grid and getattr(self.body, "affine", True) and enlarges(source_grid, grid, self.pooling):
            mapped = self._map("body", representation.positions())
            return Representation(mapped, "bnd", grid=source_grid).resize(grid).values
        mask = representation.mask if self.pooling == "none" and not grid else None
        mask = None if mask is None else mask[:, representation.prefix_tokens :]
        return self._map("body", source_positions(representation, self.source, self.target, self.pooling), mask)

    def shrinks(self, representation: Representation) -> bool:
        """Return whether the layer uses only the positions on the target's grid, and these are fewer."""
        source_grid, grid = representation.grid, self.target.grid
        by_mean = self.prefix is not None and not representation.prefix_tokens  # of all positions: source_prefix
        return (
            self.pooling == "none" and not by_mean and source_grid is not None and grid is not None
            and grid[0] * grid[1] < source_grid[0] * source_grid[1]
        )  # fmt: skip

    def _map(self, part: str, values: Tensor, mask: Tensor | None = None) -> Tensor:
        stitch: Stitch = getattr(self, part)
        weights = list(stitch.parameters())  # torch 2.7 cannot export next() with a default
        values = values.to(weights[0].dtype) if weights else values
        return stitch.map_sequence(values, mask) if isinstance(stitch, SequenceStitch) else stitch(values)

    # -- variants and baselines -------------------------------------------------------------------------------------
    def with_maps(self, body: Stitch, prefix: Stitch | None) -> StitchingLayer:
        """Return a stitching layer between the same specs with other maps and the same means."""
        means = {part: getattr(self, f"{part}_mean") for part in self.parts}
        return StitchingLayer(self.source, self.target, self.pooling, body, prefix, means)

    @property
    def equal_widths(self) -> bool:
        """Whether the source and the target have the same widths; :meth:`identity` then copies vectors unchanged."""
        return all(a == b for a, b in (self.widths, self.prefix_widths or (0, 0)))

    @property
    def is_identity(self) -> bool:
        """Whether the map of positions is the identity."""
        return isinstance(self.body, IdentityStitch)

    def identity(self) -> StitchingLayer:
        """Return the identity baseline; for unequal widths, it truncates features or pads them with zeros."""
        return self.with_maps(
            IdentityStitch(*self.widths), IdentityStitch(*self.prefix_widths) if self.prefix_widths else None
        )

    def check_causal(self) -> None:
        """Raise an error if positions depend on later ones, for networks that predict the next token."""
        if isinstance(self.body, SequenceStitch) and not self.body.causal:
            raise ValueError(
                f"a stitch of language models must be causal, and this one ({self.body.title}) depends on later "
                "tokens; fit one with causal=True"
            )

    def mean_only(self) -> StitchingLayer:
        """Return the mean baseline, which always outputs the mean of the target's rows."""
        return self.with_maps(self._constant("body"), None if self.prefix is None else self._constant("prefix"))

    def _constant(self, part: str) -> LinearStitch:
        stitch, mean = getattr(self, part), getattr(self, f"{part}_mean")
        weight = torch.zeros(stitch.out_features, stitch.in_features, device=mean.device)
        return LinearStitch.of(weight=weight, bias=mean.to(weight.dtype))

    # -- serialisation ---------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Return the configuration, without weights, as JSON values."""
        return {
            "source": self.source.to_dict(),
            "target": self.target.to_dict(),
            "pooling": self.pooling,
            "body": None,
            "prefix": None,
            # PEFT wraps a map in a LoRA layer.
            **{part: getattr(stitch := getattr(self, part), "base_layer", stitch).to_dict() for part in self.parts},
        }

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> StitchingLayer:
        """Build a stitching layer from the output of :meth:`to_dict`, without its weights."""
        prefix = config.get("prefix")
        return cls(
            RepresentationSpec(**config["source"]),
            RepresentationSpec(**config["target"]),
            config["pooling"],
            Stitch.from_dict(config["body"]),
            Stitch.from_dict(prefix) if prefix else None,
        )


def check_specs(source: RepresentationSpec, target: RepresentationSpec, pooling: Pooling) -> None:
    """Raise an error if a pooling cannot join two specs."""
    if pooling in POOLED or (source.layout == target.layout == "bd"):
        return
    if pooling == "flatten":
        if any(spec.layout == "bnd" and spec.grid is None for spec in (source, target)):
            raise ValueError(
                "pooling 'flatten' requires samples of equal length, but texts vary in length; use 'none' or 'mean'"
            )
        return
    if "bd" in (source.layout, target.layout):
        raise ValueError(
            f"pooling 'none' cannot join {source} and {target}: one of them is a vector; use 'mean' or 'flatten'"
        )
    if (source.grid is None) != (target.grid is None):
        raise ValueError(f"pooling 'none' cannot join {source} and {target}: only one of them is a grid; use 'mean'")


def part_widths(source: RepresentationSpec, target: RepresentationSpec, pooling: Pooling) -> dict[str, tuple[int, int]]:
    """Return input and output widths by part of a stitching layer: ``body``, and ``prefix`` if required."""

    def width(spec: RepresentationSpec) -> int:
        return spec.width * (spec.grid[0] * spec.grid[1] if pooling == "flatten" and spec.grid else 1)

    parts = {"body": (width(source), width(target))}
    if target.prefix_tokens and pooling not in POOLED:
        parts["prefix"] = (source.width * max(source.prefix_tokens, 1), target.width * target.prefix_tokens)
    return parts


def source_positions(
    representation: Representation, source: RepresentationSpec, target: RepresentationSpec, pooling: Pooling
) -> Tensor:
    """Return the input of ``body``, masked positions included: (batch, n, d) for ``none``, otherwise (batch, d)."""
    if source.layout == "bd":
        return representation.values
    if pooling != "none":
        return representation.rows(pooling)
    return (representation.resize(target.grid) if target.grid else representation).positions()


def enlarges(source_grid: tuple[int, int] | None, grid: tuple[int, int] | None, pooling: Pooling) -> bool:
    """Return whether resampling to the target's grid enlarges an axis and shrinks none."""
    if pooling != "none" or source_grid is None or grid is None:
        return False
    return source_grid != grid and source_grid[0] <= grid[0] and source_grid[1] <= grid[1]


def source_prefix(representation: Representation) -> Tensor:
    """Return the input of ``prefix``, (batch, d): the concatenated prefix tokens, or else the mean position."""
    return representation.prefix().flatten(1) if representation.prefix_tokens else representation.rows("mean")


def paired_rows(source: Representation, target: Representation, pooling: Pooling) -> Pairs:
    """Return the paired (n, d) rows of source and target for fitting each part, in order of sample and position."""
    if source.batch != target.batch:
        raise ValueError(f"both sides must have the same samples, got {source.batch} and {target.batch}")
    check_specs(source.spec, target.spec, pooling)
    x = source_positions(source, source.spec, target.spec, pooling)
    if pooling == "none" and source.layout != "bd":
        source.check_padding_known(pooling)
        target.check_padding_known(pooling)
        y = target.positions()
        if x.shape[1] != y.shape[1] or (
            source.mask is not None
            and target.mask is not None
            and not torch.equal(
                source.mask[:, source.prefix_tokens :], target.mask[:, target.prefix_tokens :].to(source.mask.device)
            )
        ):
            raise ValueError(
                f"pooling 'none' requires the same tokens on both sides, got {x.shape[1]} and {y.shape[1]} tokens or "
                "different masks: the tokenizers split or pad texts differently; use pooling='mean', 'cls' or 'last'"
            )
        side = target if source.mask is None else source
        mask = None if side.mask is None else side.mask[:, side.prefix_tokens :].to(x.device)
        pairs = {"body": (x.flatten(0, 1), y.flatten(0, 1)) if mask is None else (x[mask], y[mask.to(y.device)])}
    else:
        # The single token of a pooled stitch replaces the CLS token, the input of the target's head.
        pairs = {"body": (x, target.rows("cls" if pooling in POOLED and target.prefix_tokens else pooling))}
    if target.prefix_tokens and pooling not in POOLED:
        pairs["prefix"] = paired_prefix(source, target)
    return pairs


def paired_prefix(source: Representation, target: Representation) -> tuple[Tensor, Tensor]:
    """Return the rows for fitting the map of prefix tokens: one per sample, for source and target."""
    return source_prefix(source), target.prefix().flatten(1)
