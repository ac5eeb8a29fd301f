"""Vector stores whose vectors are rewritten, or whose queries are mapped.

Public names, listed in ``__init__.pyi``, are imported when they are first used: the command line lists stores, and
imports neither them nor torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
