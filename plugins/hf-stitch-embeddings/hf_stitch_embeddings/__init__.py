"""Embedding upgrades with hf-stitch: use a new encoder with an old index, without re-embedding all documents.

Importing this package is fast: public names (see ``__init__.pyi``) are imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
