"""Makes transformers' Auto classes, and with them ``pipeline``, know stitched models: ``import hf_stitch.auto``.

Example:
    >>> import hf_stitch.auto
    >>> from transformers import AutoModelForImageClassification
    >>> from hf_stitch import StitchConfig
    >>> AutoModelForImageClassification._model_mapping[StitchConfig].__name__
    'StitchedModelForImageClassification'
"""

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
)

from hf_stitch.artefacts import (
    StitchConfig,
    StitchedModel,
    StitchedModelForCausalLM,
    StitchedModelForImageClassification,
    StitchedModelForSequenceClassification,
)

AutoModel.register(StitchConfig, StitchedModel, exist_ok=True)
AutoModelForImageClassification.register(StitchConfig, StitchedModelForImageClassification, exist_ok=True)
AutoModelForSequenceClassification.register(StitchConfig, StitchedModelForSequenceClassification, exist_ok=True)
AutoModelForCausalLM.register(StitchConfig, StitchedModelForCausalLM, exist_ok=True)
