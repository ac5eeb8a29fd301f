"""Filter atoms for hf-stitch: similarity of convolutional networks from their weights alone."""

from __future__ import annotations

from hf_stitch_filter_atoms.atomizing import FilterAtomsRewrite, Truncation, atomize, atomized, deatomize
from hf_stitch_filter_atoms.coefficients import share_coefficients, train_atoms_only
from hf_stitch_filter_atoms.convolution import AtomConv2d
from hf_stitch_filter_atoms.decorrelation import channel_decorrelation
from hf_stitch_filter_atoms.gauge import gauge_bounds, set_gauge
from hf_stitch_filter_atoms.metrics import FilterAtomAngle, FilterAtoms, FilterGram, Grassmann, PatchCosine
from hf_stitch_filter_atoms.patches import PatchCovariance

__all__ = [
    "AtomConv2d",
    "FilterAtomAngle",
    "FilterAtoms",
    "FilterAtomsRewrite",
    "FilterGram",
    "Grassmann",
    "PatchCosine",
    "PatchCovariance",
    "Truncation",
    "atomize",
    "atomized",
    "channel_decorrelation",
    "deatomize",
    "gauge_bounds",
    "set_gauge",
    "share_coefficients",
    "train_atoms_only",
]
