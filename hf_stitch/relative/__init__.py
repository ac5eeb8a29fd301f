"""Relative representations: vectors described by their similarities to anchors (Moschella et al. 2023)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
