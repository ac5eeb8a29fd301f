"""Adapters: a common interface to run any model up to a cut and from a cut on. Create one with :func:`load`."""

from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.cutting.cut import CutInfo, NotACutError
from hf_stitch.adapters.cutting.halves import Back
from hf_stitch.adapters.cutting.interface import Interface
from hf_stitch.adapters.examples import ExampleError
from hf_stitch.adapters.libraries.base import Described, Library, Loaded
from hf_stitch.adapters.loading import load, load_on, load_recorded, unwrap
from hf_stitch.adapters.overrides import Override
from hf_stitch.adapters.rewriting import Rewrite, rewrite
from hf_stitch.adapters.untraining import untrained

__all__ = [
    "Adapter",
    "Back",
    "CutInfo",
    "Described",
    "ExampleError",
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
    "untrained",
    "unwrap",
]
