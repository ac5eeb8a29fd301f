from . import (
    adapters as adapters,
    analysis as analysis,
    artefacts as artefacts,
    data as data,
    matchers as matchers,
    metrics as metrics,
    plots as plots,
    plugins as plugins,
    reference as reference,
    registry as registry,
    relative as relative,
    reports as reports,
    representation as representation,
    statistics as statistics,
    stitches as stitches,
    training as training,
    workflows as workflows,
)
from .adapters import Adapter as Adapter, NotACutError as NotACutError, load as load
from .analysis import Activations as Activations, SimilarityAtlas as SimilarityAtlas
from .artefacts import (
    StitchConfig as StitchConfig,
    StitchedModel as StitchedModel,
    StitchedModelForCausalLM as StitchedModelForCausalLM,
    StitchedModelForImageClassification as StitchedModelForImageClassification,
    StitchedModelForSequenceClassification as StitchedModelForSequenceClassification,
    Stitcher as Stitcher,
)
from .data import Samples as Samples
from .plugins import load_plugin as load_plugin
from .reference import ModelReference as ModelReference
from .registry import registries as registries
from .reports import load_report as load_report, report as report
from .representation import Representation as Representation
from .statistics import Moments as Moments
from .workflows import (
    audit as audit,
    compare as compare,
    compare_all as compare_all,
    evaluate as evaluate,
    plan as plan,
    relative_model as relative_model,
    stitch as stitch,
    stitch_grid as stitch_grid,
    swap as swap,
)

__version__: str
