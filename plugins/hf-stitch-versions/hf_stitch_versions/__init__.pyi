from .result import Finding as Finding, Module as Module, Sameness as Sameness
from .workflow import same as same

__all__ = ["Finding", "Module", "Sameness", "same"]
