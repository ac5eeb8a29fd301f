"""Studies with hf-stitch: experiments from papers on similarity, and the methods they use.

Importing this package is fast, because the public names in ``__init__.pyi`` are imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
