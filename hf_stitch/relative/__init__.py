"""Relative representations: vectors described by their similarities to anchors (Moschella et al. 2023)."""

from hf_stitch.relative.anchors import AnchorSet, EncodedAnchors
from hf_stitch.relative.neighbours import nearest
from hf_stitch.relative.projection import RelativeProjection
from hf_stitch.relative.selection import Selection, select_anchors
from hf_stitch.relative.similarities import Similarity

__all__ = [
    "AnchorSet",
    "EncodedAnchors",
    "RelativeProjection",
    "Selection",
    "Similarity",
    "nearest",
    "select_anchors",
]
