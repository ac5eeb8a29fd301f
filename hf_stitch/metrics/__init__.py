"""Metrics: similarities and distances between two representations, or between the outputs of two networks.

Every metric exists in two forms. The pure function ``hf_stitch.metrics.<name>(x, y, **options)`` accepts paired rows of
shape ``(n, d)``, computes in float64, and returns a float for NumPy arrays and a 0-d tensor for tensors. The class
``registries.metrics.get(name)`` accepts the rows batch by batch. To add a metric, decorate a formula with ``of_rows``
and subclass ``MomentsMetric``, ``FeaturesMetric`` or ``MeanMetric``; the check of metrics (``docs/plugins``) tests it.
"""

import lazy_loader

_imported, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Import a public name; the error for a plugin's name says how to import it."""
    if name not in __all__:
        from hf_stitch.plugins import hint_for

        if hint := hint_for("names", name):
            raise AttributeError(f"hf_stitch.metrics has no attribute {name!r}; {hint}", name=name)
    return _imported(name)
