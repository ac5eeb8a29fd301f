"""Adapter for a whole ``SentenceTransformer``: its transformer with pooling, projections and normalisation.

The library is not a dependency: this module imports it only to load a folder or a Hub model.
"""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.cutting.interface import PROMPT
from hf_stitch.adapters.examples import ExampleError, named
from hf_stitch.adapters.libraries.base import Described, Library, Loaded
from hf_stitch.adapters.libraries.completeness import complete
from hf_stitch.adapters.libraries.transformers import Transformers
from hf_stitch.adapters.pinning import settings_of_config
from hf_stitch.adapters.preprocess import preprocess
from hf_stitch.adapters.untraining import initialise
from hf_stitch.hub import DownloadOptions, file_of
from hf_stitch.reference import MODULES, OF_SENTENCES, SENTENCES, ModelReference, Settings

ALONE = "or load only its transformer, with task='feature-extraction' or the task of its head"
"""Advice for a folder with modules that cannot be loaded."""

EMBEDDING = "sentence_embedding"
"""Key of the embeddings in the outputs of the modules."""

CHOSEN = ("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim")
"""Settings of a ``SentenceTransformer`` in addition to its modules."""

VECTORS = ("pooled", "embedding")
"""Names of the layers with one vector for each text."""


class SentenceEncoder(nn.Module):
    """The modules of a ``SentenceTransformer`` as a network from token ids to the embeddings of texts.

    Two further modules provide vectors as layers: ``pooled``, the output of the pooling, and ``embedding``, the output
    of the whole model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.steps = tuple(name for name, _ in model.named_children())
        for name, module in model.named_children():
            self.add_module(name, module)
        self.pooled, self.embedding = nn.Identity(), nn.Identity()
        self.chosen = {name: getattr(model, name, None) for name in CHOSEN}
        self.module_kwargs = getattr(model, "module_kwargs", None)

    @property
    def transformer(self) -> Any:
        """The module that reads texts: the first module, or the first module of the route of ``encode``."""
        module: Any = self.get_submodule(self.steps[0])
        routes = getattr(module, "sub_modules", None)
        return module if routes is None else routes[module._resolve_route(modality="text")][0]

    @property
    def prompt(self) -> str:
        """The text that ``encode`` puts before each text."""
        return (self.chosen["prompts"] or {}).get(self.chosen["default_prompt_name"]) or ""

    def forward(self, input_ids: Tensor, prompt_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """Compute the embeddings of a batch of texts."""
        features: dict[str, Any] = {"input_ids": input_ids, "modality": "text", **inputs}
        if prompt_mask is not None:
            features["prompt_length"] = int(prompt_mask.sum(1).max())
        for name in self.steps:
            previous, features = features, self.get_submodule(name)(dict(features))
            if EMBEDDING in features and EMBEDDING not in previous:  # later modules read only the embedding
                features = {EMBEDDING: self.pooled(features[EMBEDDING])}
        embeddings: Tensor = self.embedding(features[EMBEDDING][..., : self.chosen["truncate_dim"]])
        return embeddings


class EncoderAdapter(Adapter):
    """Adapter with two layers in addition to the blocks: the vectors after pooling and after all modules."""

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names of the blocks, and of the vectors after pooling and after all modules."""
        return (*(name for name in super().candidates if name not in VECTORS), *VECTORS)


class SentenceTransformers(Library):
    """Adapter for a ``SentenceTransformer``: a live model, or a folder or Hub model with ``modules.json``.

    The output is the embedding that ``encode`` returns, with the default prompt, the default route of a ``Router`` and
    ``truncate_dim``. For the embeddings of ``encode_query``, set ``model.default_prompt_name = "query"`` and
    ``model[0].default_route = "query"`` of a live model. Pass ``model[0].auto_model`` to leave out pooling and
    normalisation.
    """

    name: ClassVar[str] = SENTENCES
    adapter_class: ClassVar[type[Adapter]] = EncoderAdapter
    trusted_options: ClassVar[frozenset[str]] = Transformers.trusted_options | {*CHOSEN}

    def serves(self, model: Any) -> bool:
        """Return whether the model is a ``SentenceTransformer``."""
        return any(
            kind.__name__ == "SentenceTransformer" and kind.__module__.partition(".")[0] == SENTENCES
            for kind in type(model).__mro__
        )

    def load(self, reference: ModelReference, processor: Any = None, **options: Any) -> Loaded:
        """Load a folder or a Hub model with ``modules.json`` onto the CPU.

        Options are ``prompts``, ``default_prompt_name``, ``truncate_dim``, ``similarity_fn_name`` and the loading
        options of the transformer. Remote code runs only with ``trust_remote_code=True``. A ``CrossEncoder`` is loaded
        as a network of transformers with a head.
        """
        origin = str(reference.id)
        download: Any = {name: options[name] for name in DownloadOptions.__annotations__ if name in options}
        files = [file_of(origin, name, **download, revision=reference.revision) for name in (OF_SENTENCES, MODULES)]
        config, modules = (file and json.loads(file.read_text(encoding="utf-8")) for file in files)
        kind = (config or {}).get("model_type", "SentenceTransformer")
        if kind == "CrossEncoder" and modules and len(modules) == 1:
            return Transformers().load(dataclasses.replace(reference, library=Transformers.name), processor, **options)
        if modules is None or kind != "SentenceTransformer":
            fault = f"is an unsupported {kind}" if modules else f"does not contain {MODULES}: copy all of its files"
            raise ValueError(f"{origin} {fault}, {ALONE}")
        if find_spec(SENTENCES) is None or int(version("sentence-transformers").partition(".")[0]) < 6:
            # Before version 6, the library runs all code that is named in modules.json of a folder.
            raise ImportError(f"{origin} is a sentence encoder: pip install -U 'sentence-transformers>=6', {ALONE}")
        from sentence_transformers import SentenceTransformer

        pretrained, cache = options.pop("pretrained", True), options.pop("cache_dir", None)
        is_local = options.pop("local_files_only", False) or reference.is_local
        own_options = {name: options.pop(name) for name in (*CHOSEN, "token", "trust_remote_code") if name in options}

        def encoder(name: str, **loading: Any) -> Any:
            return SentenceTransformer(
                name, device=None if "device_map" in options else "cpu", cache_folder=cache and str(cache),
                revision=reference.revision, local_files_only=is_local, model_kwargs=loading, **own_options,
            )  # fmt: skip

        try:
            model, new = complete(encoder, reference, (), options)
        except TypeError as error:
            if "missing" not in str(error):  # the user passed an unknown option
                raise
            raise ValueError(f"{origin} lacks files of its modules ({error}): copy all files, {ALONE}") from error
        with torch.no_grad():
            for module in () if pretrained else reversed(list(model.modules())):
                initialise(module)
        return Loaded(model.eval(), reference, processor, new)

    def describe(
        self, model: Any, example_inputs: Any = None, processor: Any = None, content: str | None = None
    ) -> Described:
        """Describe a ``SentenceTransformer`` by its transformer and its tokenizer."""
        encoder = SentenceEncoder(model)
        transformer = encoder.transformer
        network = getattr(transformer, "auto_model", None)
        tokenizer = processor or getattr(transformer, "tokenizer", None)
        if network is None or tokenizer is None or content not in (None, "input_ids"):
            raise ExampleError(
                "a SentenceTransformer must begin with a transformer for texts, with the content input_ids, got "
                f"{type(transformer).__name__} and content={content!r}: load the inner network",
                model,
            )
        adapter = Transformers().adapter(network, ModelReference(None, SENTENCES), None, tokenizer)
        example = adapter.example if example_inputs is None else named(encoder, example_inputs, {}, "input_ids")
        limits = [limit for limit in (getattr(model, "max_seq_length", None), adapter.interface.max_tokens) if limit]
        pools_prompt = all(getattr(module, "include_prompt", True) for module in encoder.modules())
        inputs = model.preprocess(["a b"], prompt=encoder.prompt)
        interface = dataclasses.replace(
            adapter.interface, options={}, max_tokens=min(limits, default=None), prefix=encoder.prompt,
            prefix_tokens=inputs.get("prompt_length") or 0,
            arguments=(*adapter.interface.arguments, *([] if pools_prompt else [PROMPT])),
        )  # fmt: skip
        tokens = inputs["input_ids"].tolist()
        if processor is None and preprocess(["a b"], tokenizer, interface, encoder)["input_ids"].tolist() != tokens:
            raise ExampleError(
                f"encode and the tokenizer return different tokens for a text (as {inputs.get('modality')}, with a "
                f"chat template?): pass the tokenizer as processor= to use it, {ALONE}",
                model,
            )
        return Described(encoder, interface, example, tokenizer)

    def settings(self, model: nn.Module) -> Settings:
        """Return the class and the config of each module.

        Pooling and normalisation do not have weights and are recognised only by these settings.
        """
        encoder: Any = model
        modules = [(name, encoder.get_submodule(name)) for name in encoder.steps]
        options = {"prompt": encoder.prompt, "truncate_dim": encoder.chosen["truncate_dim"]}
        chosen: dict[str, Any] = {name: value for name, value in options.items() if value}
        defaults: dict[str, Any] = {}
        for name, module in modules:
            for route, parts in getattr(module, "sub_modules", {}).items():
                modules += [(f"{name}.{route}.{index}", part) for index, part in enumerate(parts)]
            if (network := getattr(module, "auto_model", None)) is not None:
                config = settings_of_config(network.config)
                chosen[name], defaults[name] = {"class": type(network).__name__, **config.chosen}, config.defaults
                continue
            chosen[name] = {"class": type(module).__name__}
            has_config = type(module).__module__.partition(".")[0] == SENTENCES or hasattr(module, "get_config_dict")
            defaults[name] = module.get_config_dict() if has_config else {}  # versions differ in their keys
        return Settings.of(chosen, defaults)

    def blueprint(self, model: nn.Module) -> dict[str, Any]:
        """Raise an error, because modules of sentence-transformers cannot be rebuilt from a config."""
        raise ValueError(
            "a SentenceTransformer cannot be rebuilt from a config. Save the Stitcher "
            "(stitched.stitcher.save_pretrained) and attach it to the live model, Stitcher.attach(source=…, target=…); "
            "or stitch only its transformer, load(…, task='feature-extraction') or model[0].auto_model"
        )
