"""Task-loss training of stitches, anchor refreshing, and callbacks that probe a network during training.

Callbacks work with ``transformers.Trainer`` (``callback.attach(trainer)``) and with custom training loops
(``callback.measure(model, step=…)``). They do not affect training: the final weights are the same as without them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
