from .plain import CannotBeRebuiltError as CannotBeRebuiltError
from .result import Candidate as Candidate, Shortened as Shortened, Size as Size
from .workflow import shorten as shorten

__all__ = ["Candidate", "CannotBeRebuiltError", "Shortened", "Size", "shorten"]
