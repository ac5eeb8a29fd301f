"""The stitching layer: everything between two networks, from the source's representation to the target's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch.representation import Pooling, Representation, RepresentationSpec
from hf_stitch.stitches.base import Stitch
from hf_stitch.stitches.identity import IdentityStitch
from hf_stitch.stitches.linear import LinearStitch

POOLED = ("mean", "cls", "last")
Pairs = dict[str, tuple[Tensor, Tensor]]


class StitchingLayer(nn.Module):
    """Carries a representation of one network's form to another's (Csiszárik et al. 2021, section 3).

    Positions are brought to the target's grid (bilinear), every one of them is mapped by ``body``, and the result takes
    the target's layout. Prefix tokens of the target (CLS, distillation) are no positions; a map of their own,
    ``prefix``, makes them all from the source's prefix tokens, or from the mean of its positions where it has none.

    Which vectors ``body`` maps is the pooling: every position (``none``), a sample's positions side by side
    (``flatten``), or one vector for a sample (``mean``, ``cls``, ``last``), which gives the target a single token, or a
    grid of one position.

    Args:
        source: Form of what comes in.
        target: Form of what goes out.
        pooling: The pooling.
        body: The map of positions; :attr:`widths` says from and to which width.
        prefix: The map of prefix tokens; :attr:`prefix_widths` says which, ``None`` where the target has none.
        means: Mean of the target's rows by part (``body``, ``prefix``), kept for the baseline that answers with it;
            zeros if not given.

    Raises:
        ValueError: If the forms cannot be joined under the policy, or a map has other widths.

    Example:
        >>> import torch
        >>> grid, tokens = RepresentationSpec("bchw", 8, (4, 4)), RepresentationSpec("bnd", 6, (2, 2), prefix_tokens=1)
        >>> layer = StitchingLayer(grid, tokens, "none", LinearStitch(8, 6), LinearStitch(8, 6))
        >>> layer(Representation(torch.randn(3, 8, 4, 4), "bchw")).values.shape
        torch.Size([3, 5, 6])
    """

    def __init__(
        self,
        source: RepresentationSpec,
        target: RepresentationSpec,
        pooling: Pooling,
        body: Stitch,
        prefix: Stitch | None = None,
        means: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Check that everything fits."""
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

    # -- what maps what ---------------------------------------------------------------------------------------------
    @property
    def widths(self) -> tuple[int, int]:
        """Widths that ``body`` maps from and to."""
        return part_widths(self.source, self.target, self.pooling)["body"]

    @property
    def prefix_widths(self) -> tuple[int, int] | None:
        """Widths that ``prefix`` maps from and to; ``None`` where the target takes no prefix tokens."""
        return part_widths(self.source, self.target, self.pooling).get("prefix")

    @property
    def parts(self) -> tuple[str, ...]:
        """``body``, and ``prefix`` where there is one."""
        return ("body",) if self.prefix is None else ("body", "prefix")

    # -- running ----------------------------------------------------------------------------------------------------
    def forward(self, representation: Representation) -> Representation:
        """The target's representation; the context is left to the target, the mask of positions kept."""
        got, batch = representation.spec, representation.batch
        if (got.layout, got.width, got.prefix_tokens) != (
            self.source.layout,
            self.source.width,
            self.source.prefix_tokens,
        ):
            raise ValueError(f"the stitch takes a representation of the form {self.source}, got {got}")
        mapped = self._map("body", source_positions(representation, self.source, self.target, self.pooling))
        spec = self.target
        if spec.layout == "bd":
            return Representation(mapped, "bd")
        if self.pooling == "flatten":
            mapped = mapped.unflatten(1, (-1, spec.width))
        elif self.pooling in POOLED:
            mapped = mapped[:, None]
        if spec.layout != "bnd":
            assert spec.grid is not None
            grid = mapped.reshape(batch, *((1, 1) if self.pooling in POOLED else spec.grid), spec.width)
            return Representation(grid if spec.layout == "bhwc" else grid.permute(0, 3, 1, 2).contiguous(), spec.layout)
        if self.prefix is not None:
            tokens = self._map("prefix", source_prefix(representation)).unflatten(1, (spec.prefix_tokens, spec.width))
            mapped = torch.cat([tokens, mapped], 1)
        mask = representation.mask
        if self.pooling in POOLED and spec.grid is None:
            mask = torch.ones(batch, 1, dtype=torch.bool, device=mapped.device)
        keeps = self.pooling not in POOLED
        return Representation(
            mapped,
            "bnd",
            mask=mask,
            prefix_tokens=spec.prefix_tokens if keeps else 0,
            grid=spec.grid if keeps else None,
        )

    def _map(self, part: str, values: Tensor) -> Tensor:
        stitch: Stitch = getattr(self, part)
        weight = next(stitch.parameters(), None)
        return stitch(values if weight is None else values.to(weight.dtype))

    # -- others of its kind -----------------------------------------------------------------------------------------
    def with_maps(self, body: Stitch, prefix: Stitch | None) -> StitchingLayer:
        """The same place, other maps."""
        means = {part: getattr(self, f"{part}_mean") for part in self.parts}
        return StitchingLayer(self.source, self.target, self.pooling, body, prefix, means)

    def identity(self) -> StitchingLayer:
        """The baseline that changes no number: widths that differ are padded with zeros or cut."""
        return self.with_maps(
            IdentityStitch(*self.widths), IdentityStitch(*self.prefix_widths) if self.prefix_widths else None
        )

    def mean_only(self) -> StitchingLayer:
        """The baseline that ignores the source and always answers with the mean of the target's rows."""
        return self.with_maps(self._constant("body"), None if self.prefix is None else self._constant("prefix"))

    def _constant(self, part: str) -> LinearStitch:
        stitch, mean = getattr(self, part), getattr(self, f"{part}_mean")
        weight = torch.zeros(stitch.out_features, stitch.in_features, device=mean.device)
        return LinearStitch.of(weight=weight, bias=mean.to(weight.dtype))

    # -- as JSON values ---------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Everything but the weights."""
        return {
            "source": self.source.to_dict(),
            "target": self.target.to_dict(),
            "pooling": self.pooling,
            "body": self.body.to_dict(),
            "prefix": None if self.prefix is None else self.prefix.to_dict(),
        }

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> StitchingLayer:
        """The layer of a :meth:`to_dict`, weights to be loaded."""
        prefix = config.get("prefix")
        return cls(
            RepresentationSpec(**config["source"]),
            RepresentationSpec(**config["target"]),
            config["pooling"],
            Stitch.from_dict(config["body"]),
            Stitch.from_dict(prefix) if prefix else None,
        )


def check_specs(source: RepresentationSpec, target: RepresentationSpec, pooling: Pooling) -> None:
    """Refuse what the policy cannot join.

    Raises:
        ValueError: Vectors and positions, or a grid and a text, under ``none``; texts under ``flatten``.
    """
    if pooling in POOLED or (source.layout == target.layout == "bd"):
        return
    if pooling == "flatten":
        if any(spec.layout == "bnd" and spec.grid is None for spec in (source, target)):
            raise ValueError("pooling 'flatten' needs samples of one length: texts have none; use 'none' or 'mean'")
        return
    if "bd" in (source.layout, target.layout):
        raise ValueError(
            f"pooling 'none' cannot join {source} and {target}: one of them is a vector; use 'mean' or 'flatten'"
        )
    if (source.grid is None) != (target.grid is None):
        raise ValueError(f"pooling 'none' cannot join {source} and {target}: only one of them forms a grid; use 'mean'")


def part_widths(source: RepresentationSpec, target: RepresentationSpec, pooling: Pooling) -> dict[str, tuple[int, int]]:
    """The maps that a stitch consists of (``body``, and ``prefix`` if needed) and the widths each maps from and to."""

    def width(spec: RepresentationSpec) -> int:
        return spec.width * (spec.grid[0] * spec.grid[1] if pooling == "flatten" and spec.grid else 1)

    parts = {"body": (width(source), width(target))}
    if target.prefix_tokens and pooling not in POOLED:
        parts["prefix"] = (source.width * max(source.prefix_tokens, 1), target.width * target.prefix_tokens)
    return parts


def source_positions(
    representation: Representation, source: RepresentationSpec, target: RepresentationSpec, pooling: Pooling
) -> Tensor:
    """What ``body`` maps: (batch, n, d) under ``none``, (batch, d) otherwise; masked positions are there too."""
    if source.layout == "bd":
        return representation.values
    if pooling != "none":
        return representation.rows(pooling)
    return (representation.resize(target.grid) if target.grid else representation).positions()


def source_prefix(representation: Representation) -> Tensor:
    """What ``prefix`` maps: the prefix tokens side by side, or the mean position where there are none: (batch, d)."""
    return representation.prefix().flatten(1) if representation.prefix_tokens else representation.rows("mean")


def paired_rows(source: Representation, target: Representation, pooling: Pooling) -> Pairs:
    """The rows that a stitch is fitted on: for each part both sides' (n, d), row by row of the same sample and place.

    Raises:
        ValueError: If the numbers of samples differ, or under ``none`` the tokens of the two sides do not
            correspond.
    """
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
                "or other masks: two tokenizers cut or pad the texts differently; use pooling='mean', 'cls' or 'last'"
            )
        side = target if source.mask is None else source
        mask = None if side.mask is None else side.mask[:, side.prefix_tokens :].to(x.device)
        pairs = {"body": (x.flatten(0, 1), y.flatten(0, 1)) if mask is None else (x[mask], y[mask.to(y.device)])}
    else:
        # The single token of a pooled stitch stands where the target's head finds its CLS token.
        pairs = {"body": (x, target.rows("cls" if pooling in POOLED and target.prefix_tokens else pooling))}
    if target.prefix_tokens and pooling not in POOLED:
        pairs["prefix"] = (source_prefix(source), target.prefix().flatten(1))
    return pairs
