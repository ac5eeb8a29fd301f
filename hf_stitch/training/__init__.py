"""Training: stitches on the task's loss, anchors that keep up with an encoder, and callbacks that watch a network.

Callbacks serve any ``transformers.Trainer`` (``callback.attach(trainer)``) and any loop of one's own
(``callback.measure(model, step=…)``). What they look at does not notice: weights end as they would have without.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
