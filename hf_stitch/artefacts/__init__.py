"""Artefacts that can be saved, shared and loaded: whole stitched models, and stitchers that name their networks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
