"""What can be said of a stitched model and of the networks it joins."""

from .evaluation import Evaluation, Score, evaluate

__all__ = ["Evaluation", "Score", "evaluate"]
