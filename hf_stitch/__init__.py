"""Compare, stitch and exchange neural networks.

Importing this package is fast: public names, listed in ``__init__.pyi``, are imported together with their dependencies
when they are first used. Auto classes and pipelines of transformers load stitched models from then on.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import Any

import lazy_loader

__version__ = "0.3.0.dev0"

_imported, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Import a public name; tell where a name is that a plugin has."""
    if name not in __all__:
        from hf_stitch.plugins import hint_for

        hint = hint_for("names", name)
        raise AttributeError(f"hf_stitch has no attribute {name!r}" + (f"; {hint}" if hint else ""), name=name)
    return _imported(name)


class _StitchConfig:
    """In place of :class:`hf_stitch.StitchConfig` until transformers makes the first one."""

    model_type = "hf_stitch"

    def __new__(cls, *values: Any, **options: Any) -> Any:
        return cls._real()(*values, **options)

    @classmethod
    def from_dict(cls, values: dict[str, Any], **options: Any) -> Any:
        return cls._real().from_dict(values, **options)

    @staticmethod
    def _real() -> Any:
        return importlib.import_module("hf_stitch.auto").StitchConfig  # a room above this one


class _Registration:
    """Registers stitched models when the Auto classes of transformers are imported, without importing them.

    It derives from nothing in importlib.abc, whose import takes a tenth of ours.
    """

    place = "transformers.models.auto.configuration_auto"
    looking = False

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != self.place or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), self.register(module))  # type: ignore[assignment, func-returns-value, method-assign]
        return spec

    def register(self, module: Any) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        module.AutoConfig.register(_StitchConfig.model_type, _StitchConfig, exist_ok=True)


if _Registration.place in sys.modules:
    _Registration().register(sys.modules[_Registration.place])
else:
    sys.meta_path.insert(0, _Registration())
