"""Cut and exchange the towers of multimodal networks: images with text, sound with text.

Importing this package is fast: public names, listed in ``__init__.pyi``, are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
