"""Compare, connect and exchange neural networks: what one knows inside, another can use.

Importing this package is cheap: a public name is imported, with what it needs, when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_stitch import adapters as adapters
    from hf_stitch import analysis as analysis
    from hf_stitch import data as data
    from hf_stitch import endpoint as endpoint
    from hf_stitch import matchers as matchers
    from hf_stitch import metrics as metrics
    from hf_stitch import models as models
    from hf_stitch import plots as plots
    from hf_stitch import registry as registry
    from hf_stitch import relative as relative
    from hf_stitch import representation as representation
    from hf_stitch import statistics as statistics
    from hf_stitch import stitches as stitches
    from hf_stitch import testing as testing
    from hf_stitch import training as training
    from hf_stitch.adapters import Adapter as Adapter
    from hf_stitch.adapters import NotACutError as NotACutError
    from hf_stitch.adapters import load as load
    from hf_stitch.analysis.activations import Activations as Activations
    from hf_stitch.analysis.atlas import SimilarityAtlas as SimilarityAtlas
    from hf_stitch.analysis.atlas import compare as compare
    from hf_stitch.analysis.auditing import Audit as Audit
    from hf_stitch.analysis.auditing import audit as audit
    from hf_stitch.analysis.evaluation import evaluate as evaluate
    from hf_stitch.data import Samples as Samples
    from hf_stitch.endpoint import Endpoint as Endpoint
    from hf_stitch.models import StitchConfig as StitchConfig
    from hf_stitch.models import StitchedModel as StitchedModel
    from hf_stitch.models import StitchedModelForCausalLM as StitchedModelForCausalLM
    from hf_stitch.models import StitchedModelForImageClassification as StitchedModelForImageClassification
    from hf_stitch.models import StitchedModelForSequenceClassification as StitchedModelForSequenceClassification
    from hf_stitch.models import Stitcher as Stitcher
    from hf_stitch.models.relative import relative_model as relative_model
    from hf_stitch.models.stitching import stitch as stitch
    from hf_stitch.models.swapping import swap as swap
    from hf_stitch.registry import registries as registries
    from hf_stitch.representation import Representation as Representation
    from hf_stitch.statistics import Moments as Moments

__version__ = "0.1.0"

_PUBLIC = {
    "Activations": "hf_stitch.analysis.activations",
    "Adapter": "hf_stitch.adapters",
    "Audit": "hf_stitch.analysis.auditing",
    "Endpoint": "hf_stitch.endpoint",
    "Moments": "hf_stitch.statistics",
    "NotACutError": "hf_stitch.adapters",
    "Representation": "hf_stitch.representation",
    "Samples": "hf_stitch.data",
    "SimilarityAtlas": "hf_stitch.analysis.atlas",
    "StitchConfig": "hf_stitch.models",
    "StitchedModel": "hf_stitch.models",
    "StitchedModelForCausalLM": "hf_stitch.models",
    "StitchedModelForImageClassification": "hf_stitch.models",
    "StitchedModelForSequenceClassification": "hf_stitch.models",
    "Stitcher": "hf_stitch.models",
    "audit": "hf_stitch.analysis.auditing",
    "compare": "hf_stitch.analysis.atlas",
    "evaluate": "hf_stitch.analysis.evaluation",
    "load": "hf_stitch.adapters",
    "registries": "hf_stitch.registry",
    "relative_model": "hf_stitch.models.relative",
    "stitch": "hf_stitch.models.stitching",
    "swap": "hf_stitch.models.swapping",
}
"""Every public name and the module that it comes from."""

_ROOMS = (
    "adapters",
    "analysis",
    "data",
    "endpoint",
    "matchers",
    "metrics",
    "models",
    "plots",
    "registry",
    "relative",
    "representation",
    "statistics",
    "stitches",
    "testing",
    "training",
)
"""The modules that ``import hf_stitch`` alone gives access to."""

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import a public name or a room at its first use (PEP 562)."""
    if name in _PUBLIC:
        value = getattr(import_module(_PUBLIC[name]), name)
    elif name in _ROOMS:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What there is to import, imported or not."""
    return sorted({*globals(), *__all__, *_ROOMS})
