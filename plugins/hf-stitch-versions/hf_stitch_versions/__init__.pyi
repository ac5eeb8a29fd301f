from .changes.result import (
    Change as Change,
    Difference as Difference,
    Effect as Effect,
    Estimate as Estimate,
    Outputs as Outputs,
)
from .changes.workflow import diff as diff
from .sameness.result import Finding as Finding, Module as Module, Sameness as Sameness
from .sameness.workflow import same as same

__all__ = [
    "Change", "Difference", "Effect", "Estimate", "Finding", "Module", "Outputs", "Sameness", "diff", "same"
]  # fmt: skip
