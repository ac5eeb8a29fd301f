"""Compare, stitch and exchange neural networks.

Importing this package is fast: public names, listed in ``__init__.pyi``, are imported with their dependencies on first
use. After the import, Auto classes and pipelines of transformers load stitched models.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import Any

import lazy_loader

__version__ = "0.3.0.dev0"

_imported, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Import a public name; the error for other names names the plugin, if any."""
    if name not in __all__:
        from hf_stitch.plugins import hint_for

        hint = hint_for("names", name)
        message = f"module 'hf_stitch' has no attribute {name!r}" + (f"; {hint}" if hint else "")
        raise AttributeError(message, name=name)
    return _imported(name)


class _StitchConfig:
    """Placeholder of :class:`hf_stitch.StitchConfig` until transformers creates the first config."""

    model_type = "hf_stitch"

    def __new__(cls, *values: Any, **options: Any) -> Any:
        return cls._real()(*values, **options)

    @classmethod
    def from_dict(cls, values: dict[str, Any], **options: Any) -> Any:
        return cls._real().from_dict(values, **options)

    @staticmethod
    def _real() -> Any:
        return importlib.import_module("hf_stitch.auto").StitchConfig  # late, because it imports this package


class _Registration:
    """Import hook that registers stitched models when transformers imports its Auto classes.

    It does not derive from a class in importlib.abc, because importing that would make this import 10 % slower.
    """

    module_name = "transformers.models.auto.configuration_auto"
    is_searching = False

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != self.module_name or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_searching = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), self.register(module))  # type: ignore[assignment, func-returns-value, method-assign]
        return spec

    def register(self, module: Any) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        module.AutoConfig.register(_StitchConfig.model_type, _StitchConfig, exist_ok=True)


if _Registration.module_name in sys.modules:
    _Registration().register(sys.modules[_Registration.module_name])
else:
    sys.meta_path.insert(0, _Registration())
