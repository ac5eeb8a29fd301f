"""Compare, connect and exchange neural networks: what one knows inside, another can use.

Importing this package is cheap: a public name is imported, with what it needs, when it is first used. The names and
where they come from stand in ``__init__.pyi``.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
