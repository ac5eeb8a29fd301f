from .changes.callback import DiffCallback as DiffCallback
from .changes.family import diff_all as diff_all
from .changes.family_result import Family as Family, Pair as Pair
from .changes.result import (
    Change as Change,
    Difference as Difference,
    Effect as Effect,
    Estimate as Estimate,
    Outputs as Outputs,
)
from .changes.workflow import diff as diff
from .metrics import RelativeChange as RelativeChange, UpdateRank as UpdateRank, WeightCosine as WeightCosine
from .sameness.result import Finding as Finding, Module as Module, Sameness as Sameness
from .sameness.workflow import same as same

__all__ = [
    "Change", "DiffCallback", "Difference", "Effect", "Estimate", "Family", "Finding", "Module", "Outputs", "Pair",
    "RelativeChange", "Sameness", "UpdateRank", "WeightCosine", "diff", "diff_all", "same"
]  # fmt: skip
