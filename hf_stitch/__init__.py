"""Compare, stitch and exchange neural networks.

Importing this package is fast: public names, listed in ``__init__.pyi``, are imported together with their dependencies
when they are first used.
"""

import lazy_loader

__version__ = "0.3.0.dev0"

_imported, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Import a public name; tell where a name is that a plugin has."""
    if name not in __all__:
        from hf_stitch.plugins import install_hint

        hint = install_hint("names", name)
        raise AttributeError(f"hf_stitch has no attribute {name!r}" + (f"; {hint}" if hint else ""), name=name)
    return _imported(name)
