"""Training: stitches on the task's loss, and what to watch while networks are trained."""

from .loop import DivergedError
from .task_loss import PRESETS, TaskLoss

__all__ = ["PRESETS", "DivergedError", "TaskLoss"]
