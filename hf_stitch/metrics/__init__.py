"""Metrics: how alike two representations, or the outputs of two networks, are.

Every metric is a pure function ``hf_stitch.metrics.<name>(x, y, **options)`` of paired rows (n × d arrays give a float,
tensors a 0-d tensor, both computed in float64) and a class that streams, ``registries.metrics.get(name)``. A metric of
your own is a formula decorated with ``of_rows`` and a subclass of ``MomentsMetric``, ``FeaturesMetric`` or
``MeanMetric``; ``hf_stitch.testing`` checks it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
