"""Artefacts to save, share and load: whole stitched models, and stitchers with references to their networks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
