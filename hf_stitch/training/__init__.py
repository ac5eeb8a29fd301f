"""Training: stitches on the task's loss, anchors that keep up with an encoder, and callbacks that watch a network.

Callbacks serve any ``transformers.Trainer`` (``callback.attach(trainer)``) and any loop of one's own
(``callback.measure(model, step=…)``). What they look at does not notice: weights end as they would have without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_stitch.training.anchors import AnchorRefresh as AnchorRefresh
    from hf_stitch.training.callback import Measurement as Measurement
    from hf_stitch.training.callback import ProbingCallback as ProbingCallback
    from hf_stitch.training.dynamics import Dynamics as Dynamics
    from hf_stitch.training.dynamics import DynamicsRecorder as DynamicsRecorder
    from hf_stitch.training.loop import DivergedError as DivergedError
    from hf_stitch.training.similarity import SimilarityCallback as SimilarityCallback
    from hf_stitch.training.stitchability import StitchabilityCallback as StitchabilityCallback
    from hf_stitch.training.task_loss import PRESETS as PRESETS
    from hf_stitch.training.task_loss import TaskLoss as TaskLoss

_HOMES = {
    "anchors": ("AnchorRefresh",),
    "callback": ("Measurement", "ProbingCallback"),
    "dynamics": ("Dynamics", "DynamicsRecorder"),
    "loop": ("DivergedError",),
    "similarity": ("SimilarityCallback",),
    "stitchability": ("StitchabilityCallback",),
    "task_loss": ("PRESETS", "TaskLoss"),
}
_PUBLIC = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_PUBLIC))}")
    value = getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What there is to import, imported or not."""
    return sorted({*globals(), *_PUBLIC})
