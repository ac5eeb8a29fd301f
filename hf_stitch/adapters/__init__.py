"""Adapters: a common interface to run any model up to a cut and from a cut on. Create one with :func:`load`."""

from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.cutting.cut import Cut, CutInfo, CutPlan, NotACutError
from hf_stitch.adapters.cutting.halves import Back, Front
from hf_stitch.adapters.cutting.interface import Interface
from hf_stitch.adapters.examples import ExampleError
from hf_stitch.adapters.libraries.base import Described, Library, Loaded
from hf_stitch.adapters.loading import load, load_on, load_recorded, unwrap
from hf_stitch.adapters.overrides import Override
from hf_stitch.adapters.rewriting import Rewrite, rewrite, rewrites_of
from hf_stitch.adapters.untraining import untrained

__all__ = [
    "Adapter",
    "Back",
    "Cut",
    "CutInfo",
    "CutPlan",
    "Described",
    "ExampleError",
    "Front",
    "Interface",
    "Library",
    "Loaded",
    "NotACutError",
    "Override",
    "Rewrite",
    "load",
    "load_on",
    "load_recorded",
    "rewrite",
    "rewrites_of",
    "untrained",
    "unwrap",
]
