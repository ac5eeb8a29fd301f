"""Metrics: similarities and distances between two representations, or between the outputs of two networks.

Every metric exists in two forms. The pure function ``hf_stitch.metrics.<name>(x, y, **options)`` takes paired rows:
NumPy arrays of shape ``(n, d)`` give a float, tensors give a 0-d tensor, and both are computed in float64. The class
``registries.metrics.get(name)`` accepts the rows batch by batch. To add a metric, decorate a formula with ``of_rows``
and subclass ``MomentsMetric``, ``FeaturesMetric`` or ``MeanMetric``; the check of metrics (``docs/plugins``) tests it.
"""

import lazy_loader

_imported, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Import a public name; tell where a name is that a plugin has."""
    if name not in __all__:
        from hf_stitch.plugins import hint_for

        if hint := hint_for("names", name):
            raise AttributeError(f"hf_stitch.metrics has no attribute {name!r}; {hint}", name=name)
    return _imported(name)
