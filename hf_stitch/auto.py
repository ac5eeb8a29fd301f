"""Registration of stitched models with the Auto classes and ``pipeline`` of transformers.

``import hf_stitch`` is enough: transformers then imports this module for the first stitched model.

Example:
    >>> import hf_stitch.auto
    >>> from transformers import AutoModelForImageClassification
    >>> from hf_stitch import StitchConfig
    >>> AutoModelForImageClassification._model_mapping[StitchConfig].__name__
    'StitchedModelForImageClassification'
"""

import warnings
from pkgutil import resolve_name

import transformers

from hf_stitch.artefacts import StitchConfig, StitchedModel
from hf_stitch.registry import PluginError, registries


def _register(kind: type[StitchedModel]) -> None:
    getattr(transformers, kind.auto_class).register(StitchConfig, kind, exist_ok=True)


transformers.AutoConfig.register(StitchConfig.model_type, StitchConfig, exist_ok=True)
for _task in registries.tasks:
    try:
        for _kind in registries.tasks.get(_task).models.values():
            _register(resolve_name(_kind))
    except PluginError as _error:  # a broken plugin must not prevent the import
        warnings.warn(str(_error), stacklevel=2)
