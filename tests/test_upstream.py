"""Canaries: facts about other libraries whose change hf-stitch would not notice by itself.

A failing test names the fact and the place to mend. ``docs/upstream.md`` says what would happen without it.
"""

from __future__ import annotations

import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import timm.layers
import timm.models
import torch
import transformers as hf
from torch import nn
from transformers.models.auto import modeling_auto

PAGE = Path(__file__).parent.parent / "docs" / "upstream.md"

SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
CACHES = ("cache", "past_key_values", "cache_params")


def gpt2(kind: Any = None) -> Any:
    config = hf.GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return (kind or hf.GPT2LMHeadModel)(config).eval()


def bert() -> Any:
    return hf.BertModel(hf.BertConfig(vocab_size=20, **SMALL)).eval()


def vit() -> Any:
    return hf.ViTModel(hf.ViTConfig(image_size=8, patch_size=4, **SMALL)).eval()


def takes(kind: Any, *names: str) -> bool:
    return set(names) <= inspect.signature(kind.forward).parameters.keys()


def takes_one(kind: Any, *names: str) -> bool:
    return len(inspect.signature(kind.forward).parameters.keys() & set(names)) == 1


def has(thing: Any, *names: str) -> bool:
    return all(hasattr(thing, name) for name in names)


def refuses(kind: type[Exception], call: Callable[..., Any], *given: Any) -> bool:
    try:
        call(*given)
    except kind:
        return True
    return False


def source(thing: Any) -> str:
    return inspect.getsource(thing)


def fact(name: str, holds: Callable[[], Any], mend: str) -> Any:
    """A row: what is true upstream, a function that tells whether it still is, and the place of ours that needs it."""
    return pytest.param(holds, mend, id=name)


# -- transformers: generation -----------------------------------------------------------------------------------------
def filled_cache() -> Any:
    cache = hf.DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    return cache


def layers_share_a_cache() -> bool:
    layer = filled_cache().layers[0]
    return hf.Cache(layers=[layer, layer]).layers[1] is layer


def static_cache() -> bool:
    cache = hf.StaticCache(config=gpt2().config, max_cache_len=8)
    return cache.is_compileable and len(cache.layers) == 2


def window_of_a_layer() -> bool:
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    found, other = (
        hf.DynamicCache(config=hf.MistralConfig(**sizes, num_key_value_heads=1, sliding_window=window)).layers[0]
        for window in (4, None)
    )
    return (found.is_sliding, found.sliding_window, getattr(other, "is_sliding", False)) == (True, 4, False)


def layer_with_a_state() -> bool:
    layer = hf.DynamicCache(config=hf.MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1)).layers[0]
    kept = hasattr(layer, "has_previous_state"), hasattr(filled_cache().layers[0], "get_seq_length")
    return kept == (True, True) and not hasattr(layer, "get_seq_length")


def assisted_by() -> set[str]:
    """Options that make ``generate`` propose several tokens and take some back."""
    found = set()
    for name in hf.GenerationConfig().to_dict():
        config = hf.GenerationConfig()
        try:
            setattr(config, name, 1)
            found |= {name} if config.get_generation_mode().name == "ASSISTED_GENERATION" else set()
        except (TypeError, ValueError, AttributeError):  # no number
            continue
    return found


def unknown_windows() -> set[str]:
    """Keys of decoders whose layers have no types, for which ``align="prefix"`` may not know that they bound masks."""
    from hf_stitch.adapters.prefixes.adapter import WINDOWS

    found: set[str] = set()
    for file in Path(hf.__file__).parent.glob("models/*/configuration_*.py"):
        config, network = file.read_text("utf-8"), file.with_name(file.name.replace("configuration", "modeling"))
        if network.exists() and "ForCausalLM(" in network.read_text("utf-8") and "layer_types" not in config:
            found |= set(re.findall(r"^    (\w*window\w*):", config, re.MULTILINE))
    assert "keep_window_size" in found
    return found - {*WINDOWS, "use_sliding_window", "window_size"}  # GPT-Neo has the types local and global


GENERATION = [
    fact("GPT-2 takes the cache as cache or past_key_values", lambda: takes_one(hf.GPT2LMHeadModel, *CACHES[:2]),
         "hf_stitch/artefacts/cache.py, NAMES"),
    fact("an output has the cache as cache or past_key_values",
         lambda: set(CACHES[:2]) & gpt2()(torch.tensor([[1]]), use_cache=True).keys(),
         "hf_stitch/artefacts/cache.py, NAMES"),
    fact("Mamba takes the cache as cache or cache_params", lambda: takes_one(hf.MambaForCausalLM, *CACHES[::2]),
         "hf_stitch/artefacts/cache.py, NAMES"),
    fact("a DynamicCache is empty and grows",
         lambda: not hf.DynamicCache().layers and len(filled_cache().layers) == 1,
         "hf_stitch/artefacts/cache.py and language.py, _joint_cache"),
    fact("a Cache has a length", lambda: filled_cache().get_seq_length() == 3,
         "hf_stitch/artefacts/language.py, _options"),
    fact("a layer of a Cache has keys and values",
         lambda: filled_cache().layers[0].keys.shape == filled_cache().layers[0].values.shape == (1, 2, 3, 4),
         "hf_stitch/artefacts/cache.py, keep"),
    fact("Cache(layers=...) shares layers", layers_share_a_cache, "hf_stitch/artefacts/cache.py, shown"),
    fact("a StaticCache is compileable", static_cache, "hf_stitch/artefacts/language.py, _joint_cache"),
    fact("a layer with a window has is_sliding and sliding_window", window_of_a_layer,
         "hf_stitch/artefacts/cache.py, layer_types"),
    fact("a layer with a state has has_previous_state and no length", layer_with_a_state,
         "hf_stitch/artefacts/cache.py, layer_types and has_no_attention"),
    fact("configs have layer_types, by these names",
         lambda: hf.Gemma2Config(num_hidden_layers=2).layer_types == ["sliding_attention", "full_attention"],
         "hf_stitch/artefacts/cache.py, layer_types, and adapters/prefixes/adapter.py, _check_attention"),
    fact("configs name their windows",
         lambda: hf.MistralConfig().sliding_window and hf.Llama4TextConfig().attention_chunk_size
         and hf.LongformerConfig().attention_window and set(hf.GPTNeoConfig().attention_layers) == {"global", "local"},
         "hf_stitch/adapters/prefixes/adapter.py, WINDOWS and _check_attention"),
    fact("decoders have no other windows", lambda: not unknown_windows(),
         "hf_stitch/adapters/prefixes/adapter.py, WINDOWS"),
    fact("decoders take position_ids and logits_to_keep",
         lambda: takes(hf.LlamaForCausalLM, "position_ids", "logits_to_keep")
         and takes(hf.GPT2LMHeadModel, "position_ids", "logits_to_keep"),
         "hf_stitch/artefacts/language.py, _options and forward"),
    fact("generate calls prepare_inputs_for_generation and create_masks_for_generate",
         lambda: "next_sequence_length" in inspect.signature(
             hf.GenerationMixin.prepare_inputs_for_generation).parameters
         and "create_masks_for_generate" in source(hf.generation.utils),
         "hf_stitch/artefacts/language.py, methods of these names"),
    fact("options that generate several tokens at once",
         lambda: {"prompt_lookup_num_tokens"} <= assisted_by()
         <= {"prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"}
         and hasattr(hf.GenerationConfig(), "prefill_chunk_size")
         and "assistant_model" in inspect.signature(hf.GenerationMixin.generate).parameters,
         "hf_stitch/artefacts/language.py, AHEAD"),
]  # fmt: skip


# -- transformers: configs --------------------------------------------------------------------------------------------
def remembers_its_place() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        gpt2().save_pretrained(folder)
        return bool(hf.GPT2LMHeadModel.from_pretrained(folder).config._name_or_path == folder)


def implementations() -> set[str]:
    """What a config knows of implementations, which may be code on the Hub."""
    named = {name for name in (*dir(hf.PreTrainedConfig), *vars(hf.BertConfig())) if "implementation" in name}
    return named | {name for name in hf.BertConfig().to_dict() if "implementation" in name or "kernel" in name}


def backbone_keys() -> set[str]:
    from transformers import backbone_utils

    text = source(backbone_utils.consolidate_backbone_kwargs_to_config)
    return set(re.findall(r"""kwargs\.(?:pop|get)\(\s*["'](\w+)""", text))


def ambiguous() -> set[str]:
    """Keys that raise where they are read from the config of a whole network."""
    kinds = [getattr(hf, name) for name in ("Gemma4TextConfig", "NeoMMEConfig") if hasattr(hf, name)]
    return {name for kind in kinds for name in getattr(kind(), "per_layer_attributes", None) or ()}


READ = {
    *("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "vocab_size", "hidden_size"),
    *("max_position_embeddings", "use_cache", "layer_types", "num_hidden_layers", "image_size", "num_channels"),
    *("id2label", "problem_type", "is_encoder_decoder"),
}
"""Keys that hf-stitch reads of the config of a whole network, if they are there."""


def unknown_counts() -> set[str]:
    """Keys with the number of layers that a record may set to a billion."""
    from hf_stitch.artefacts.record import LAYERS

    files = Path(hf.__file__).parent.glob("models/*/configuration_*.py")
    keys = {key for file in files for key in re.findall(r'"num_hidden_layers": "(\w+)"', file.read_text("utf-8"))}
    assert "n_layer" in keys
    return {key for key in keys if not LAYERS.search(key)}


CONFIGS = [
    fact("configs have a text config", lambda: hf.LlavaConfig().get_text_config().model_type == "llama"
         and hf.BertConfig().get_text_config().model_type == "bert",
         "hf_stitch/adapters/libraries/configs.py, text_config"),
    fact("configs have the ids of special tokens",
         lambda: (hf.BartConfig().decoder_start_token_id, hf.BartConfig().pad_token_id) == (2, 1)
         and has(hf.LlamaConfig(), "bos_token_id", "eos_token_id", "pad_token_id"),
         "hf_stitch/adapters/libraries/transformers.py, _special_ids and _start_id"),
    fact("configs have sizes",
         lambda: gpt2().config.max_position_embeddings == 16 and gpt2().config.vocab_size == 20
         and gpt2().config.hidden_size == 8 and has(hf.ViTConfig(), "image_size", "num_channels"),
         "hf_stitch/adapters/libraries/transformers.py, _max_tokens and _image_example"),
    fact("RoBERTa numbers positions from padding_idx",
         lambda: hf.RobertaModel(hf.RobertaConfig(vocab_size=20, max_position_embeddings=20, **SMALL))
         .embeddings.position_embeddings.padding_idx == 1,
         "hf_stitch/adapters/libraries/configs.py, positions_from_padding"),
    fact("configs have id2label, by default LABEL_0",
         lambda: hf.BertConfig().id2label == {0: "LABEL_0", 1: "LABEL_1"},
         "hf_stitch/data/classes.py, _names_of, and scoring/halves.py, _classes"),
    fact("configs contain the place they were loaded from", remembers_its_place,
         "hf_stitch/adapters/libraries/transformers.py, origin"),
    fact("configs name implementations by these keys",
         lambda: implementations() <= {f"{before}{what}_implementation{after}" for what in ("attn", "experts")
                                       for before in ("", "_") for after in ("", "_internal")},
         "hf_stitch/adapters/untrusted.py, own_code_only"),
    fact("configs name backbones by these keys",
         lambda: {"backbone"} <= backbone_keys() <= {"backbone", "backbone_kwargs", "use_pretrained_backbone",
                                                     "use_timm_backbone", "timm_backbone"},
         "hf_stitch/adapters/untrusted.py, ELSEWHERE and own_code_only"),
    fact("configs have to_diff_dict", lambda: has(hf.PreTrainedConfig, "to_diff_dict"),
         "hf_stitch/adapters/pinning.py, settings_of_config, and adapters/attributes.py, changed"),
    fact("what is read of a whole config is not set per layer", lambda: not ambiguous() & READ,
         "hf_stitch: read config.per_layer_config[i] instead"),
    fact("numbers of layers have known keys", lambda: not unknown_counts(), "hf_stitch/artefacts/record.py, LAYERS"),
]  # fmt: skip


# -- transformers: networks -------------------------------------------------------------------------------------------
def named(task: str) -> list[str]:
    values = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values()
    return [name for value in values for name in ((value,) if isinstance(value, str) else value)]


def decoders() -> float:
    """The share of decoders whose names tell that they are; of the others, the task that loads them tells it."""
    names = named("CAUSAL_LM")
    return sum("ForCausalLM" in name or "LMHeadModel" in name for name in names) / len(names)


def construction_calls_initialize_weights() -> bool:
    calls: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf.PreTrainedModel, "initialize_weights", lambda model: calls.append(model))
        gpt2()
    return bool(calls)


def modules_of_hooks() -> set[str]:
    network = vit()
    network(torch.zeros(1, 3, 8, 8), output_hidden_states=True)
    return {hook.__module__.partition(".")[0] for m in network.modules() for hook in m._forward_hooks.values()}


NETWORKS = [
    fact("networks have main_input_name",
         lambda: (hf.BertModel.main_input_name, hf.ViTModel.main_input_name) == ("input_ids", "pixel_values"),
         "hf_stitch/adapters/libraries/transformers.py, of, and adapters/preprocess.py, load_processor"),
    fact("names of classifiers contain their task",
         lambda: all("ForImageClassification" in name for name in named("IMAGE_CLASSIFICATION"))
         and all(name.endswith("ForSequenceClassification") for name in named("SEQUENCE_CLASSIFICATION")),
         "hf_stitch/adapters/libraries/configs.py, task_of_head and lacks_padding"),
    fact("most names of decoders contain their task", lambda: decoders() > 0.85,
         "hf_stitch/adapters/libraries/configs.py, task_of_head"),
    fact("construction calls initialize_weights", construction_calls_initialize_weights,
         "hf_stitch/adapters/libraries/transformers.py, build"),
    fact("networks have _no_split_modules", lambda: gpt2()._no_split_modules == {"GPT2Block"}
         or gpt2()._no_split_modules == ["GPT2Block"],
         "hf_stitch/artefacts/weights.py, whole_blocks, and training/sharding.py, blocks_of"),
    fact("hooks for hidden states belong to transformers", lambda: modules_of_hooks() == {"transformers"},
         "hf_stitch/adapters/cutting/surgery.py, is_bookkeeping"),
    fact("CLIP finds the end of a text by the largest id where eos_token_id is 2",
         lambda: "eos_token_id == 2" in source(import_module("transformers.models.clip.modeling_clip")),
         "hf_stitch/adapters/families.py"),
]  # fmt: skip


# -- transformers: processors and Trainer -----------------------------------------------------------------------------
def word_level() -> Any:
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({"a": 0, "?": 1}, "?"))
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")


EVENTS = (
    *("on_init_end", "on_train_begin", "on_train_end", "on_step_begin", "on_step_end", "on_epoch_end"),
    *("on_evaluate", "on_save"),
)

PROCESSORS = [
    fact("tokenizers have a limit, a vocabulary and a backend",
         lambda: word_level().model_max_length > 10**9 and word_level().get_vocab() and word_level().is_fast
         and word_level().pad_token_id is None and type(word_level().backend_tokenizer).__module__ == "tokenizers",
         "hf_stitch/adapters/libraries/transformers.py, _max_tokens, and adapters/pinning.py"),
    fact("slow tokenizers have bpe_ranks or sp_model",
         lambda: "self.bpe_ranks" in source(hf.CTRLTokenizer) and "self.sp_model" in source(
             import_module("transformers.tokenization_utils_sentencepiece")),
         "hf_stitch/adapters/pinning.py, _of_tokenizer"),
    fact("the image processor of timm networks is TimmWrapperImageProcessor",
         lambda: "data_config" in source(hf.TimmWrapperImageProcessor),
         "hf_stitch/adapters/libraries/transformers.py, of"),
    fact("the Trainer reads accepts_loss_kwargs", lambda: '"accepts_loss_kwargs"' in source(hf.Trainer),
         "hf_stitch/artefacts/network.py, StitchedNetwork.accepts_loss_kwargs"),
]  # fmt: skip


# -- timm -------------------------------------------------------------------------------------------------------------
def kinds_of(base: type) -> list[type]:
    return [k for k in vars(timm.layers).values() if isinstance(k, type) and issubclass(k, base) and k is not base]


TIMM = [
    fact("networks have a pretrained_cfg with an architecture",
         lambda: timm.create_model("resnet10t").pretrained_cfg["architecture"] == "resnet10t",
         "hf_stitch/adapters/libraries/timm.py, serves and blueprint"),
    fact("networks have num_classes", lambda: timm.create_model("resnet10t", num_classes=0).num_classes == 0,
         "hf_stitch/adapters/libraries/timm.py, task"),
    fact("patch embeddings have img_size",
         lambda: timm.create_model("test_vit", img_size=32).patch_embed.img_size == (32, 32),
         "hf_stitch/adapters/libraries/timm.py, _native_size"),
    fact("create_model takes the source of weights by these names",
         lambda: inspect.signature(timm.create_model).parameters.keys()
         <= {"model_name", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir",
             "scriptable", "exportable", "no_jit", "kwargs"}, "hf_stitch/adapters/libraries/timm.py, NOT_ARCHITECTURE"),
    fact("a pretrained_cfg names its files so",
         lambda: {"hf_hub_filename", "url"} <= timm.models.PretrainedCfg.__dataclass_fields__.keys(),
         "hf_stitch/adapters/libraries/timm.py, load"),
    fact("no norm extends nn.RMSNorm with channels on another axis", lambda: not kinds_of(nn.RMSNorm),
         "hf_stitch/adapters/discovery/shapes.py, _channel_axis"),
]  # fmt: skip


# -- sentence-transformers --------------------------------------------------------------------------------------------
def sentences() -> Any:
    return pytest.importorskip("sentence_transformers")


def of_sentences(name: str) -> Any:
    sentences()
    from sentence_transformers.util import import_from_string

    return import_from_string(f"sentence_transformers.models.{name}")


def classed() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        sentences().SentenceTransformer(modules=[of_sentences("Pooling")(8)], device="cpu").save(folder)
        kind = json.loads(Path(folder, "config_sentence_transformers.json").read_text())["model_type"]
        (module,) = json.loads(Path(folder, "modules.json").read_text())
    return kind == "SentenceTransformer" and {"path", "type"} <= module.keys()


def refuses_others() -> bool:
    from sentence_transformers.util.misc import import_module_class

    with tempfile.TemporaryDirectory() as folder:
        return refuses(ValueError, import_module_class, "other.Other", folder)


SENTENCES = [
    fact("the class is SentenceTransformer in sentence_transformers",
         lambda: sentences().SentenceTransformer.__name__ == "SentenceTransformer"
         and sentences().SentenceTransformer.__module__.startswith("sentence_transformers."),
         "hf_stitch/adapters/libraries/sentence_transformers.py, serves"),
    fact("its first module has auto_model", lambda: "def auto_model" in source(of_sentences("Transformer")),
         "hf_stitch/adapters/libraries/sentence_transformers.py, describe"),
    fact("it has a tokenizer, a limit and prompts",
         lambda: has(sentences().SentenceTransformer, "tokenizer", "max_seq_length", "preprocess") and has(
             sentences().SentenceTransformer(modules=[of_sentences("Pooling")(8)]), "prompts", "default_prompt_name",
             "truncate_dim", "module_kwargs"),
         "hf_stitch/adapters/libraries/sentence_transformers.py, describe, SentenceEncoder"),
    fact("a folder has modules.json, and the class of its model under model_type", classed,
         "hf_stitch/adapters/libraries/sentence_transformers.py, load"),
    fact("code of others is refused in folders, too", refuses_others,
         "hf_stitch/adapters/libraries/sentence_transformers.py, load"),
]  # fmt: skip


# -- accelerate -------------------------------------------------------------------------------------------------------
def launchers() -> set[str]:
    from accelerate import state
    from accelerate.utils import environment

    names = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
    return {name for name in names if f'"{name}"' not in source(state) + source(environment)}


ACCELERATE = [
    fact("launchers are recognised by these variables", lambda: not launchers(), "hf_stitch/running.py, LAUNCHED"),
]  # fmt: skip


# -- torch and others -------------------------------------------------------------------------------------------------
def passing_the_mode() -> set[str]:
    """Functions that take values out of tensors without an operation, as far as a mode sees them."""
    from torch.overrides import TorchFunctionMode

    seen: set[Any] = set()

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func)
            return func(*args, **(kwargs or {}))

    values = torch.zeros(2)
    with Watch():
        _ = [values.tolist(), values.numpy(), np.asarray(values), np.from_dlpack(values)]
        _ = [values.map_(values, lambda a, b: a), values.apply_(lambda a: a), values.tensor_split(values.long()[:1])]
    wanted = ("tolist", "numpy", "__array__", "__dlpack__", "map_", "apply_", "tensor_split")
    return {name for name in wanted if getattr(torch.Tensor, name) not in seen}


def classes_of_folders() -> Any:
    torchvision = pytest.importorskip("torchvision")
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "cat").mkdir()
        Image.new("L", (2, 2)).save(Path(folder, "cat", "0.png"))
        return torchvision.datasets.ImageFolder(folder).classes


def sealed_events() -> Iterator[str]:
    """Yield what opens a connection or starts a program although the code is sealed."""
    import os
    import socket
    import subprocess

    from hf_stitch.adapters.untrusted import SealedError, sealed

    tried: dict[str, Callable[[], Any]] = {
        "subprocess": lambda: subprocess.run(["true"], check=False),
        "system": lambda: os.system("true"),
        "posix_spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
        "getaddrinfo": lambda: socket.getaddrinfo("localhost", 9),
        "connect": lambda: socket.socket().connect(("127.0.0.1", 9)),
        "sendto": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)),
    }
    for name, attempt in tried.items():
        with sealed():
            try:
                with suppress(OSError):
                    attempt()
            except SealedError:
                continue
        yield name


def arrow() -> bool:
    pa = pytest.importorskip("pyarrow")
    rows = pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2))
    return rows.type.list_size == 2 and rows.null_count == 1 and has(pa.chunked_array([rows]), "combine_chunks")


TORCH = [
    fact("operations are counted by their packet",
         lambda: torch.ops.aten.mm in torch.utils.flop_counter.flop_registry
         and torch.ops.aten.convolution in torch.utils.flop_counter.flop_registry,
         "hf_stitch/adapters/discovery/trace.py, Operations"),
    fact("what takes values out of tensors passes through modes", lambda: not passing_the_mode(),
         "hf_stitch/adapters/cutting/flow.py, OUTSIDE"),
    fact("data sets of torchvision have classes", lambda: classes_of_folders() == ["cat"],
         "hf_stitch/data/tables.py, Mapped.classes"),
    fact("Python reports connections and programs to audit hooks", lambda: not list(sealed_events()),
         "hf_stitch/adapters/untrusted.py, SEALED"),
    fact("Arrow arrays have list_size, null_count and combine_chunks", arrow,
         "plugins/hf-stitch-embeddings, vectors.py, _from_column, and stores/lancedb.py"),
]  # fmt: skip

LIBRARIES = {
    "transformers": [*GENERATION, *CONFIGS, *NETWORKS, *PROCESSORS],
    "timm": TIMM,
    "sentence-transformers": SENTENCES,
    "accelerate": ACCELERATE,
    "torch and others": TORCH,
}
FACTS = [pytest.param(*row.values, id=f"{library}: {row.id}") for library, rows in LIBRARIES.items() for row in rows]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("holds", "mend"), FACTS)
def test_the_fact_still_holds(holds: Callable[[], Any], mend: str, request: pytest.FixtureRequest) -> None:
    what = f"{request.node.callspec.id} : mend {mend}"
    try:
        found = holds()
    except Exception as error:
        raise AssertionError(f"{what} ({type(error).__name__}: {error})") from error
    assert found, what


def test_the_page_lists_each_fact_once() -> None:
    listed = re.findall(r"\*([^*|`]+)\*", PAGE.read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(str(row.id) for rows in LIBRARIES.values() for row in rows)
