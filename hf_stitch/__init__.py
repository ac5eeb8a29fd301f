"""Compare, stitch and exchange neural networks.

Importing this package is fast: public names, listed in ``__init__.pyi``, are imported together with their dependencies
when they are first used.
"""

import lazy_loader

__version__ = "0.3.0.dev0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
