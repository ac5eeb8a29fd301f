from .depth import Depth as Depth, best_depth as best_depth
from .plain import CannotBeRebuiltError as CannotBeRebuiltError
from .result import Candidate as Candidate, Shortened as Shortened, Size as Size
from .workflow import shorten as shorten

__all__ = ["Candidate", "CannotBeRebuiltError", "Depth", "Shortened", "Size", "best_depth", "shorten"]
