"""Which vectors of a sample are the rows that a comparison reads: a named choice, since metrics depend on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hf_stitch.representation import Pooling, RepresentationSpec

Rows = Literal["flat", "positions", "resized", "mean", "tokens", "cls", "last"]
POOLINGS: dict[Rows, Pooling] = {
    "flat": "flatten", "positions": "none", "resized": "none", "mean": "mean", "tokens": "none", "cls": "cls",
    "last": "last",
}  # fmt: skip
"""Rows -> the pooling of a representation that gives them, and that of saved activations."""

ROWS_OF: dict[str, Rows] = {"flatten": "flat", "none": "resized", "mean": "mean", "cls": "cls", "last": "last"}
"""Pooling -> the rows that it gave before they had names."""

Kind = tuple[int, int] | Literal["vector", "text"]
"""What the positions of a layer are: a grid, the tokens of a text, or none."""


def per_sample(rows: Rows) -> bool:
    """Return whether each sample is one row."""
    return POOLINGS[rows] != "none"


def kind_of(spec: RepresentationSpec) -> Kind:
    """Return what the positions of a layer are."""
    return "vector" if spec.layout == "bd" else spec.grid or "text"


def check_layer(spec: RepresentationSpec, rows: Rows) -> None:
    """Refuse a layer that has no such rows."""
    kind = kind_of(spec)
    if rows == "flat" and kind == "text":
        raise ValueError(f"{spec}: texts vary in length, so that rows='flat' have no width; use 'mean' or 'positions'")
    grid = spec.layout != "bnd" or (rows == "cls" and spec.grid is not None and spec.prefix_tokens == 0)
    if rows in ("cls", "last") and kind != "vector" and grid:
        raise ValueError(f"{spec} has no token for rows={rows!r}; use 'mean' or 'flat'")


def differ(a: RepresentationSpec, b: RepresentationSpec, rows: Rows) -> str:
    """Return why row i of a layer is not the same as row i of another; empty if it is."""
    if per_sample(rows):
        return ""
    kinds, prefixes = (kind_of(a), kind_of(b)), (a.prefix_tokens, b.prefix_tokens)
    if rows == "resized" and not any(isinstance(kind, str) for kind in kinds):
        return ""
    if kinds[0] != kinds[1]:
        return f"rows={rows!r} pairs equal positions, which {a} and {b} do not have"
    if rows == "tokens" and prefixes[0] != prefixes[1]:
        return f"rows='tokens' pairs all tokens, but {a} and {b} have other prefix tokens"
    return ""


def mixed(sides: Sequence[Sequence[RepresentationSpec]], rows: Rows) -> str:
    """Return which kinds of rows a comparison mixes, whose values mean different things; empty if there is one."""
    first, last = [list(specs) for specs in (sides[0], sides[-1])] if sides else ([], [])
    pairs = [(kind_of(a), kind_of(b)) for a in first for b in last if not differ(a, b, rows)]
    vectors = {kind == "vector" for pair in pairs for kind in pair}
    if len({a != b for a, b in pairs}) > 1 and rows == "resized":
        return "positions of equal grids, and positions that were resized"
    if len(vectors) > 1 and rows != "flat":
        return f"vectors that layers output, and {'the ' * per_sample(rows)}{rows} of others"
    return ""
