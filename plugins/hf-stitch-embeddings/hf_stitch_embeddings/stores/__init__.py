"""Vector stores for upgrades and for mapped queries.

Public names (see ``__init__.pyi``) are imported on first use: the command line lists stores without importing the
stores or torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
