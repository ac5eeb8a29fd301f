"""Adapter for a whole ``SentenceTransformer``: its transformer with pooling, projections and normalisation.

The library is not a dependency: this module never imports it, and works on the modules of a model that exists.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor, nn

from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.examples import ExampleError, named
from hf_stitch.adapters.libraries.base import Described, Library
from hf_stitch.adapters.libraries.transformers import Transformers
from hf_stitch.adapters.pinning import settings_of_config
from hf_stitch.printing import warn
from hf_stitch.reference import ModelReference, Settings

LIBRARY = "sentence_transformers"

EMBEDDING = "sentence_embedding"
"""Key of the embeddings in what the modules pass on."""

PLAIN = ("Normalize", "LayerNorm")
"""Modules without settings beside their weights, which in older versions have no config."""

CHOSEN = ("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim")
"""What a ``SentenceTransformer`` keeps beside its modules."""

VECTORS = ("pooled", "embedding")
"""Names of the layers with one vector for each text."""


class SentenceEncoder(nn.Module):
    """The modules of a ``SentenceTransformer`` as a network from token ids to the embeddings of texts.

    Two further modules name what the others keep among other values: ``pooled``, the output of the pooling, and
    ``embedding``, the output of the whole model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.steps = tuple(name for name, _ in model.named_children())
        for name, module in model.named_children():
            self.add_module(name, module)
        self.pooled, self.embedding = nn.Identity(), nn.Identity()
        self.chosen = {name: getattr(model, name, None) for name in CHOSEN}

    def forward(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Compute the embeddings of a batch of texts."""
        features: dict[str, Any] = {"input_ids": input_ids, **inputs}
        for name in self.steps:
            before, features = features, self.get_submodule(name)(dict(features))
            if EMBEDDING in features and EMBEDDING not in before:  # later modules read nothing else
                features = {EMBEDDING: self.pooled(features[EMBEDDING])}
        embeddings: Tensor = self.embedding(features[EMBEDDING])
        return embeddings


class EncoderAdapter(Adapter):
    """Adapter with two layers beside the blocks: the vectors after pooling and after all modules."""

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names of the blocks, and of the vectors after pooling and after all modules."""
        return (*super().candidates, *VECTORS)


class SentenceTransformers(Library):
    """Adapter for a live ``SentenceTransformer``, which preprocesses raw texts with its tokenizer.

    The output is the embedding that ``encode`` returns, without prompts. Pass ``model[0].auto_model`` to leave out
    pooling and normalisation.
    """

    name: ClassVar[str] = LIBRARY
    adapter_class: ClassVar[type[Adapter]] = EncoderAdapter

    def serves(self, model: Any) -> bool:
        """Return whether the model is a ``SentenceTransformer``."""
        return any(
            kind.__name__ == "SentenceTransformer" and kind.__module__.partition(".")[0] == LIBRARY
            for kind in type(model).__mro__
        )

    def describe(
        self, model: Any, example_inputs: Any = None, processor: Any = None, content: str | None = None
    ) -> Described:
        """Describe a ``SentenceTransformer`` by its transformer and its tokenizer."""
        network, tokenizer = getattr(model[0], "auto_model", None), processor or getattr(model, "tokenizer", None)
        if network is None or tokenizer is None or content not in (None, "input_ids"):
            raise ExampleError(
                "a SentenceTransformer must begin with a transformer for texts, whose content is input_ids, got "
                f"{type(model[0]).__name__} and content={content!r}: load the network inside it",
                model,
            )
        if prompt := (getattr(model, "prompts", None) or {}).get(getattr(model, "default_prompt_name", None)):
            warn(f"encode puts the prompt {prompt!r} before each text, this adapter does not: put it there")
        inner = Transformers().adapter(network, ModelReference(None, LIBRARY), None, tokenizer)
        encoder = SentenceEncoder(model)
        example = inner.example if example_inputs is None else named(encoder, example_inputs, {}, "input_ids")
        limits = [each for each in (getattr(model, "max_seq_length", None), inner.interface.max_tokens) if each]
        interface = dataclasses.replace(inner.interface, options={}, max_tokens=min(limits, default=None))
        return Described(encoder, interface, example, tokenizer)

    def settings(self, model: nn.Module) -> Settings:
        """Return the class of each module, the config of the transformer, and those of the others.

        Pooling and normalisation have no weights by which they could be recognised.
        """
        encoder: Any = model
        first, *others = encoder.steps
        network = encoder.get_submodule(first).auto_model
        found = settings_of_config(network.config)
        chosen, defaults = {first: {"class": type(network).__name__, **found.chosen}}, {first: found.defaults}
        for name in others:
            module = encoder.get_submodule(name)
            kind, read = type(module), getattr(module, "get_config_dict", None)
            chosen[name] = {"class": kind.__name__}
            if read is None and kind.__module__.partition(".")[0] == LIBRARY and kind.__name__ not in PLAIN:
                raise ValueError(
                    f"module {name!r} ({kind.__name__}) has no get_config_dict, so its settings cannot be "
                    "compared: use a version of sentence-transformers with it"
                )
            defaults[name] = read() if read else {}  # versions differ in their keys
        return Settings.of(chosen, defaults)

    def blueprint(self, model: nn.Module) -> dict[str, Any]:
        """Raise an error, because the modules of sentence-transformers are not rebuilt from a config."""
        raise ValueError(
            "a SentenceTransformer cannot be rebuilt from a config. Save the Stitcher "
            "(stitched.stitcher.save_pretrained) and attach it to the live model, Stitcher.attach(source=…, target=…); "
            "or stitch its transformer alone, model[0].auto_model"
        )
