"""Filter atoms for hf-stitch: similarity of convolutional networks from their weights alone."""

from __future__ import annotations

from hf_stitch_filter_atoms.atomizing import Truncation, atomize, atomized, deatomize
from hf_stitch_filter_atoms.coefficients import share_coefficients, train_atoms_only
from hf_stitch_filter_atoms.convolution import AtomConv2d

__all__ = ["AtomConv2d", "Truncation", "atomize", "atomized", "deatomize", "share_coefficients", "train_atoms_only"]
