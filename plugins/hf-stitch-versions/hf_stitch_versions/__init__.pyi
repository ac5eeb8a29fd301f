from .changes.callback import DiffCallback as DiffCallback
from .changes.family import diff_all as diff_all
from .changes.family_result import Family as Family, Pair as Pair
from .changes.lineage import BlockLineage as BlockLineage, Lineage as Lineage
from .changes.moved import Move as Move
from .changes.result import (
    Change as Change,
    Difference as Difference,
    Effect as Effect,
    Estimate as Estimate,
    Outputs as Outputs,
)
from .changes.weights import WeightChange as WeightChange
from .changes.workflow import diff as diff
from .metrics import RelativeChange as RelativeChange, UpdateRank as UpdateRank, WeightCosine as WeightCosine
from .sameness.result import Finding as Finding, Module as Module, Sameness as Sameness
from .sameness.workflow import same as same

__all__ = [
    "BlockLineage", "Change", "DiffCallback", "Difference", "Effect", "Estimate", "Family", "Finding", "Lineage",
    "Module", "Move", "Outputs", "Pair", "RelativeChange", "Sameness", "UpdateRank", "WeightChange", "WeightCosine",
    "diff", "diff_all", "same"
]  # fmt: skip
