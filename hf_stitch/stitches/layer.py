"""The stitching layer: maps the representation of a source layer to that of a target layer."""

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

POOLED = ("mean", "cls", "last")
Pairs = dict[str, tuple[Tensor, Tensor]]


class StitchingLayer(nn.Module):
    """Module that maps a representation of one spec to another (Csiszárik et al. 2021, section 3).

    Positions are resampled to the grid of the target (bilinear), each is mapped by ``body``, and the result is arranged
    in the layout of the target. Prefix tokens of the target (CLS, distillation) are not positions. A separate map,
    ``prefix``, computes all of them from the prefix tokens of the source, or from the mean of its positions if it has
    none.

    The pooling defines the vectors that ``body`` maps: every position (``none``), the concatenated positions of a
    sample (``flatten``), or one vector per sample (``mean``, ``cls``, ``last``). One vector per sample gives the target
    a single token, or a grid with one position.

    Called with a representation that has the layout, width and prefix tokens of the source spec, it returns one of the
    target, without context and with the mask of positions. Another one is a ``ValueError``.

    Args:
        source: Spec of the input.
        target: Spec of the output.
        pooling: The pooling.
        body: Map of positions; :attr:`widths` are its input and output widths.
        prefix: Map of prefix tokens; :attr:`prefix_widths` are its widths. None if the target has no prefix tokens.
        means: Mean of the target's rows by part (``body``, ``prefix``), kept for the mean baseline; zeros by default.

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
                got = "none" if stitch is None else f"{stitch.in_features} -> {stitch.out_features}"
                want = "none" if widths is None else f"{widths[0]} -> {widths[1]}"
                raise ValueError(
                    f"the {part} of a stitch from {source} to {target} ({pooling}) must map {want}, got {got}"
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
        """Input and output width of ``prefix``; None if the target has no prefix tokens."""
        return part_widths(self.source, self.target, self.pooling).get("prefix")

    @property
    def parts(self) -> tuple[str, ...]:
        """``("body",)``, or ``("body", "prefix")`` if there is a map of prefix tokens."""
        return ("body",) if self.prefix is None else ("body", "prefix")

    # -- forward ----------------------------------------------------------------------------------------------------
    def __call__(self, representation: Representation) -> Representation:
        """Map a representation of the source to one of the target, without context, with the mask of positions."""
        got, spec = representation.spec, self.target
        if (got.layout, got.width, got.prefix_tokens) != (
            self.source.layout,
            self.source.width,
            self.source.prefix_tokens,
        ):
            raise ValueError(f"the stitching layer needs a representation of spec {self.source}, got {got}")
        mask, grid = representation.mask, representation.grid
        beside = {"mask": mask, "grid": grid, "padding_unknown": representation.padding_unknown}
        mapped: Tensor = super().__call__(representation.values, **beside)
        if spec.layout != "bnd":
            return Representation(mapped, spec.layout)
        mask = None if mask is None else mask.to(mapped.device)
        if self.pooling in POOLED:
            mask = None if spec.grid is not None else mapped.new_ones(mapped.shape[:2], dtype=torch.bool)
        elif mask is not None and got.prefix_tokens != spec.prefix_tokens:
            mask = functional.pad(mask[:, got.prefix_tokens :], (spec.prefix_tokens, 0), value=True)
        keeps = self.pooling not in POOLED
        return Representation(
            mapped,
            "bnd",
            mask=mask,
            prefix_tokens=spec.prefix_tokens if keeps else 0,
            grid=spec.grid if keeps else None,
        )

    def forward(
        self, values: Tensor, *, mask: Tensor | None, grid: tuple[int, int] | None, padding_unknown: bool
    ) -> Tensor:
        """Map the values of a representation, which hooks of this module see.

        Args:
            values: The values, in the layout of the source.
            mask: For texts: (batch, tokens) bool, true for real tokens.
            grid: Height and width of the grid of positions.
            padding_unknown: Whether some positions are padding, but it is unknown which.
        """
        own, spec = self.source, self.target
        representation = Representation(
            values, own.layout, mask, own.prefix_tokens, grid, padding_unknown=padding_unknown
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
            placed = mapped.reshape(values.shape[0], *((1, 1) if self.pooling in POOLED else spec.grid), spec.width)
            return placed if spec.layout == "bhwc" else placed.permute(0, 3, 1, 2).contiguous()
        if self.prefix is None:
            return mapped
        tokens = self._map("prefix", source_prefix(representation)).unflatten(1, (spec.prefix_tokens, spec.width))
        return torch.cat([tokens, mapped], 1)

    def _map_positions(self, representation: Representation) -> Tensor:
        grid = self.target.grid
        own = representation.grid
        # Interpolation weights add up to 1, so that an affine map may come first, on fewer positions. A layer of PEFT,
        # too: it is in place of an affine one.
        if grid and getattr(self.body, "affine", True) and enlarges(own, grid, self.pooling):
            return Representation(self._map("body", representation.positions()), "bnd", grid=own).resize(grid).values
        mask = representation.mask if self.pooling == "none" and not grid else None
        mask = None if mask is None else mask[:, representation.prefix_tokens :]
        return self._map("body", source_positions(representation, self.source, self.target, self.pooling), mask)

    def shrinks(self, representation: Representation) -> bool:
        """Whether all that is read of a representation are its positions on the target's grid, which has fewer."""
        own, grid = representation.grid, self.target.grid
        by_mean = self.prefix is not None and not representation.prefix_tokens  # of all positions: source_prefix
        return (
            self.pooling == "none" and not by_mean and own is not None and grid is not None
            and grid[0] * grid[1] < own[0] * own[1]
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
        """Whether the source and the target have the same widths, so that :meth:`identity` changes no vector."""
        return all(a == b for a, b in (self.widths, self.prefix_widths or (0, 0)))

    @property
    def is_identity(self) -> bool:
        """Whether positions are not mapped."""
        return isinstance(self.body, IdentityStitch)

    def identity(self) -> StitchingLayer:
        """Return the identity baseline: for unequal widths, features are cut or padded with zeros."""
        return self.with_maps(
            IdentityStitch(*self.widths), IdentityStitch(*self.prefix_widths) if self.prefix_widths else None
        )

    def check_causal(self) -> None:
        """Check that no position depends on a later one, for networks that predict the next token."""
        if isinstance(self.body, SequenceStitch) and not self.body.causal:
            raise ValueError(
                f"the stitch, {self.body.title}, reads later tokens, which a language model predicts: fit one with "
                "causal=True"
            )

    def mean_only(self) -> StitchingLayer:
        """Return the mean baseline, which ignores the source and always outputs the mean of the target's rows."""
        return self.with_maps(self._constant("body"), None if self.prefix is None else self._constant("prefix"))

    def _constant(self, part: str) -> LinearStitch:
        stitch, mean = getattr(self, part), getattr(self, f"{part}_mean")
        weight = torch.zeros(stitch.out_features, stitch.in_features, device=mean.device)
        return LinearStitch.of(weight=weight, bias=mean.to(weight.dtype))

    # -- serialisation ---------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Return everything except the weights as JSON values."""
        return {
            "source": self.source.to_dict(),
            "target": self.target.to_dict(),
            "pooling": self.pooling,
            "body": None,
            "prefix": None,
            # PEFT puts a LoRA around a map.
            **{part: getattr(stitch := getattr(self, part), "base_layer", stitch).to_dict() for part in self.parts},
        }

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> StitchingLayer:
        """Build a stitching layer from :meth:`to_dict`; load its weights afterwards."""
        prefix = config.get("prefix")
        return cls(
            RepresentationSpec(**config["source"]),
            RepresentationSpec(**config["target"]),
            config["pooling"],
            Stitch.from_dict(config["body"]),
            Stitch.from_dict(prefix) if prefix else None,
        )


def check_specs(source: RepresentationSpec, target: RepresentationSpec, pooling: Pooling) -> None:
    """Check that two specs can be joined with a pooling."""
    if pooling in POOLED or (source.layout == target.layout == "bd"):
        return
    if pooling == "flatten":
        if any(spec.layout == "bnd" and spec.grid is None for spec in (source, target)):
            raise ValueError(
                "pooling 'flatten' needs samples of equal length, but texts vary in length; use 'none' or 'mean'"
            )
        return
    if "bd" in (source.layout, target.layout):
        raise ValueError(
            f"pooling 'none' cannot join {source} and {target}: one of them is a vector; use 'mean' or 'flatten'"
        )
    if (source.grid is None) != (target.grid is None):
        raise ValueError(f"pooling 'none' cannot join {source} and {target}: only one of them is a grid; use 'mean'")


def part_widths(source: RepresentationSpec, target: RepresentationSpec, pooling: Pooling) -> dict[str, tuple[int, int]]:
    """The parts of a stitching layer (``body``, and ``prefix`` if needed) with their input and output widths."""

    def width(spec: RepresentationSpec) -> int:
        return spec.width * (spec.grid[0] * spec.grid[1] if pooling == "flatten" and spec.grid else 1)

    parts = {"body": (width(source), width(target))}
    if target.prefix_tokens and pooling not in POOLED:
        parts["prefix"] = (source.width * max(source.prefix_tokens, 1), target.width * target.prefix_tokens)
    return parts


def source_positions(
    representation: Representation, source: RepresentationSpec, target: RepresentationSpec, pooling: Pooling
) -> Tensor:
    """The input of ``body``: (batch, n, d) with ``none``, (batch, d) otherwise; masked positions are included."""
    if source.layout == "bd":
        return representation.values
    if pooling != "none":
        return representation.rows(pooling)
    return (representation.resize(target.grid) if target.grid else representation).positions()


def enlarges(own: tuple[int, int] | None, grid: tuple[int, int] | None, pooling: Pooling) -> bool:
    """Return whether positions on a grid are enlarged to that of the target in one axis, and shrunk in none."""
    if pooling != "none" or own is None or grid is None:
        return False
    return own != grid and own[0] <= grid[0] and own[1] <= grid[1]


def source_prefix(representation: Representation) -> Tensor:
    """The input of ``prefix``, (batch, d): concatenated prefix tokens, or the mean position if there are none."""
    return representation.prefix().flatten(1) if representation.prefix_tokens else representation.rows("mean")


def paired_rows(source: Representation, target: Representation, pooling: Pooling) -> Pairs:
    """For each part the (n, d) rows of both sides to fit a stitching layer on, paired by sample and position."""
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
                f"pooling 'none' needs both sides to have the same tokens, got {x.shape[1]} and {y.shape[1]} "
                "or other masks: the tokenizers split or pad texts differently; use pooling='mean', 'cls' or 'last'"
            )
        side = target if source.mask is None else source
        mask = None if side.mask is None else side.mask[:, side.prefix_tokens :].to(x.device)
        pairs = {"body": (x.flatten(0, 1), y.flatten(0, 1)) if mask is None else (x[mask], y[mask.to(y.device)])}
    else:
        # The single token of a pooled stitch replaces the CLS token that the target's head reads.
        pairs = {"body": (x, target.rows("cls" if pooling in POOLED and target.prefix_tokens else pooling))}
    if target.prefix_tokens and pooling not in POOLED:
        pairs["prefix"] = paired_prefix(source, target)
    return pairs


def paired_prefix(source: Representation, target: Representation) -> tuple[Tensor, Tensor]:
    """The rows to fit the map of prefix tokens on: one per sample, of both sides."""
    return source_prefix(source), target.prefix().flatten(1)
