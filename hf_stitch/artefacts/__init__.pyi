from .classification import (
    StitchedModelForImageClassification as StitchedModelForImageClassification,
    StitchedModelForSequenceClassification as StitchedModelForSequenceClassification,
)
from .configuration import StitchConfig as StitchConfig
from .description import Description as Description
from .head import Head as Head, HeadConfig as HeadConfig
from .language import StitchedModelForCausalLM as StitchedModelForCausalLM
from .modeling import StitchedModel as StitchedModel, Stitcher as Stitcher
