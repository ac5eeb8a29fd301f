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
from .ports.port import PortError as PortError
from .sameness.result import (
    Cause as Cause,
    Finding as Finding,
    Module as Module,
    Sameness as Sameness,
)
from .sameness.workflow import (
    DifferentError as DifferentError,
    assert_same as assert_same,
    same as same,
)

__all__ = [
    "BlockLineage", "Cause", "Change", "DiffCallback", "Difference", "DifferentError", "Effect", "Estimate", "Family",
    "Finding", "Lineage", "Module", "Move", "Outputs", "Pair", "PortError", "RelativeChange", "Sameness", "UpdateRank",
    "WeightChange", "WeightCosine", "assert_same", "diff", "diff_all", "same"
]  # fmt: skip
