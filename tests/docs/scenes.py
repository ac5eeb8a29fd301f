"""For each page of the documentation, the names that its snippets assume to exist.

A page's *scene* is a namespace of small networks and samples. :func:`on_the_hub` provides the networks that pages load
from the Hub.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from datasets import ClassLabel, Dataset, Features, Image as ImageFeature, Value
from hf_stitch_word_vectors import WordVectors
from PIL import Image

import hf_stitch
from hf_stitch import Adapter, Samples

from tiny_networks import BODY, SIZE, TEXT, WORDS, plain_tokenizer  # isort: skip
from two_tokenizers import decoder  # isort: skip

CLASSES = 3
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
ERRORS = sorted((Path(__file__).parents[2] / "docs" / "errors").glob("*.md"))
Namespace = dict[str, Any]
"""Name -> value, or a ``partial`` that creates it when it is asked for."""


class Scene(Namespace):
    """A namespace of which asking for a name creates the value."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return value() if isinstance(value, partial) else value


# -- networks and samples ----------------------------------------------------------------------------------------------


@cache
def pictures(n: int, seed: int = 0) -> Dataset:
    random = np.random.default_rng(seed)
    images = [Image.fromarray(random.integers(0, 255, (40, 48, 3), dtype=np.uint8)) for _ in range(n)]
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=[f"class {i}" for i in range(CLASSES)])})
    return Dataset.from_dict({"image": images, "label": [i % CLASSES for i in range(n)]}, features=features)


@cache
def sentences(n: int, seed: int = 0) -> Dataset:
    random = np.random.default_rng(seed)
    texts = [" ".join(random.choice(WORDS, size=random.integers(3, 9))) for _ in range(n)]
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes", "perhaps"])})
    return Dataset.from_dict({"text": texts, "label": [i % 3 for i in range(n)]}, features=features)


def cnn(seed: int = 0, name: str = "resnet18", **arguments: Any) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = {"input_size": (3, SIZE, SIZE), "crop_pct": 1.0}
    thin = arguments or {"channels": (16, 24, 32, 32)}
    return timm.create_model(name, num_classes=CLASSES, pretrained_cfg_overlay=config, **thin).eval()


def vit(seed: int = 0) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    config = transformers.ViTConfig(
        **{**BODY, "num_hidden_layers": 8}, image_size=SIZE, patch_size=8, num_labels=CLASSES
    )
    return transformers.ViTForImageClassification(config).eval()


def vit_processor() -> Any:
    return transformers.ViTImageProcessor(size={"height": SIZE, "width": SIZE})


def of_texts(model: Any) -> Adapter:
    return hf_stitch.load(model.eval(), processor=plain_tokenizer())


def bert(layers: int = 3) -> Any:
    config = transformers.BertConfig(**{**TEXT, "num_hidden_layers": layers}, num_labels=3)
    return transformers.BertForSequenceClassification(config).eval()


def gpt2(**sizes: int) -> Any:
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(**{"n_embd": 24, "n_layer": 7, "n_head": 4, "vocab_size": 80, **ends, **sizes})
    return transformers.GPT2LMHeadModel(config).eval()


def llama(**sizes: int) -> Any:
    config = transformers.LlamaConfig(**{**TEXT, **sizes}, bos_token_id=1, eos_token_id=2)
    return transformers.LlamaForCausalLM(config).eval()


def text_network(family: str, seed: int = 0) -> Adapter:
    """Create a small BERT classifier or GPT-2. Both use the same tokenizer."""
    torch.manual_seed(seed)
    return of_texts(gpt2() if family == "gpt2" else bert())


def words_of(count: int) -> list[str]:
    return [row["text"] for row in sentences(count)]


@cache
def on_the_hub() -> dict[str, dict[str, bytes]]:
    """Return the files of the networks that pages load from the Hub, with the same ids but smaller sizes."""
    rexnet = {"width_mult": 0.25, "depth_mult": 0.4, "initial_chs": 8, "final_chs": 64}
    return {
        "timm/rexnet_100.nav_in1k": _timm_files(cnn(0, "rexnet_100", **rexnet), rexnet),
        "timm/resnet18.a1_in1k": _timm_files(cnn(1), {"channels": (16, 24, 32, 32)}),
        "google/vit-base-patch16-224": files_of(vit().save_pretrained, vit_processor().save_pretrained),
    }


def _timm_files(model: torch.nn.Module, arguments: dict[str, Any]) -> dict[str, bytes]:
    return files_of(lambda path: timm.models.save_for_hf(model, path, model_args=arguments, safe_serialization=True))


def files_of(*writers: Callable[[str], object]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        for write in writers:
            write(name)
        return {path.name: path.read_bytes() for path in Path(name).iterdir()}


@cache
def _written(write: Callable[[], None]) -> Path:
    """Return a folder with what a function writes to the working folder. It is called once."""
    folder = Path(_FOLDERS.name) / write.__name__
    folder.mkdir()
    with contextlib.chdir(folder):
        write()
    return folder


_FOLDERS = tempfile.TemporaryDirectory()


SHORT = "resnet10t"
"""A network with half as many blocks, for pages that name none of the others."""


@cache
def _loaded(seed: int = 0, architecture: str = "resnet18", name: str = "") -> Adapter:
    """Load a CNN once for all pages, of which none changes it; there is one for each name."""
    return hf_stitch.load(cnn(seed, architecture))


@cache
def _vision_target() -> Adapter:
    return hf_stitch.load(vit(), processor=vit_processor())


# -- pages -------------------------------------------------------------------------------------------------------------


def readme() -> Namespace:
    """Images. The page loads its networks from the Hub."""
    return {"images": pictures(60)}


def bench() -> Namespace:
    """Three networks with different seeds, and their data."""
    train, test = Samples.of(pictures(90)).split(0.5, 0)
    return {**{name: _loaded(seed) for seed, name in enumerate("abc")}, "train": train, "test": test}


def compare() -> Namespace:
    """Two image networks, two text networks, and saved activations."""
    np.savez("theirs.npz", **{"layer": np.random.default_rng(0).normal(size=(1000, 8))})
    return {
        "a": _loaded(), "b": _loaded(1), "dataset": pictures(40), "bert": text_network("bert"),
        "gpt2": text_network("gpt2"), "texts": sentences(40),
    }  # fmt: skip


def report() -> Namespace:
    """Two image networks and a stitched model."""
    a, b, dataset = _loaded(0, SHORT), _loaded(1, SHORT), pictures(40)
    layers = {"source_layer": a.layers[1], "target_layer": b.layers[1]}
    return {"a": a, "b": b, "dataset": dataset, "stitched": hf_stitch.stitch(a, b, dataset, **layers)}


def relative() -> Namespace:
    """A CNN and a ViT, images, and a file of many rows."""
    torch.manual_seed(0)
    deit = timm.create_model(
        "deit_tiny_patch16_224", img_size=SIZE, depth=12, embed_dim=24, num_classes=CLASSES,
        pretrained_cfg_overlay={"input_size": (3, SIZE, SIZE), "crop_pct": 1.0},
    )  # fmt: skip
    a, b = _loaded(), hf_stitch.load(deit.eval())
    train, test = Samples.of(pictures(340)), Samples.of(pictures(12, seed=1))
    np.save("a_million.npy", np.random.default_rng(0).normal(size=(50, 32)).astype(np.float32))
    return {"a": a, "b": b, "train": train, "test": test, "my_images": train, "network": a}


def save() -> Namespace:
    """A stitched model of two networks from the Hub, and both networks."""
    source, target = (hf_stitch.load(name) for name in ("timm/rexnet_100.nav_in1k", "google/vit-base-patch16-224"))
    layers = {"source_layer": "features.8", "target_layer": "vit.layers.6"}
    stitched = hf_stitch.stitch(source, target, pictures(60), **layers, progress=False)
    return {"stitched": stitched, "a": stitched.parents[0], "b": stitched.parents[1]}


def lora() -> Namespace:
    """Texts, a network, an adapter of PEFT, and the network with the adapter merged, in folders."""
    peft = pytest.importorskip("peft")
    base = text_network("bert")
    for folder in ("base", "merged"):
        base.model.save_pretrained(folder)
        base.processor.save_pretrained(folder)
    warnings.simplefilter("ignore", FutureWarning)  # in the whole test: peft reads what transformers 5.24 renamed
    config = peft.LoraConfig(target_modules=["query", "value"], init_lora_weights=False)
    peft.get_peft_model(base.model, config).save_pretrained("adapter")
    return {"texts": sentences(60)}


def int8() -> Namespace:
    """A network, the same one with linear layers in int8, and texts."""
    original = text_network("bert").model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization and the tensors of it are deprecated
        quantized = torch.ao.quantization.quantize_dynamic(original, {torch.nn.Linear})
    texts = sentences(60)
    return {
        "original": original, "quantized": quantized, "tokenizer": plain_tokenizer(), "texts": texts, "labelled": texts,
    }  # fmt: skip


def same() -> Namespace:
    """A network, copies with another eps, with one tuned block and with rounded weights, and texts."""
    base = text_network("bert")
    port, tuned = copy.deepcopy(base.model), copy.deepcopy(base.model)
    port.bert.encoder.layer[1].output.LayerNorm.eps = 1e-5
    for value in tuned.bert.encoder.layer[1].parameters():
        value.data *= 1.5
    copies = {"port": port, "tuned": tuned, "quantized": copy.deepcopy(base.model).to(torch.bfloat16)}
    loaded = {name: of_texts(model) for name, model in copies.items()}
    return {"base": base, "original": base, "texts": words_of(40), **loaded}


def distil() -> Namespace:
    """A teacher of six blocks that change much, a student that is made of its first three, and texts."""
    torch.manual_seed(0)
    teacher, student = bert(6), bert(3)
    for value in teacher.bert.encoder.parameters():
        value.data *= 8 if value.dim() > 1 else 1
    student.load_state_dict(teacher.state_dict(), strict=False)
    return {"teacher": of_texts(teacher), "student": of_texts(student), "texts": words_of(200)}


def shortened() -> Namespace:
    """A language model of four blocks, an encoder, and texts."""
    body = transformers.BertModel(transformers.BertConfig(**TEXT))
    return {
        "model": of_texts(llama(num_hidden_layers=4)), "texts": words_of(80), "encoder": of_texts(body),
        "labelled": sentences(80),
    }  # fmt: skip


def towers() -> Namespace:
    """A network of images and texts with its processor, an encoder of images, and images with captions."""
    tokenizer = plain_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    mark = tokenizer.convert_tokens_to_ids("<image>")
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SMALL, image_size=24, patch_size=8),
        text_config=transformers.LlamaConfig(
            **SMALL, num_key_value_heads=2, vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2, pad_token_id=0
        ),
        image_token_id=mark, image_token_index=mark,
    )  # fmt: skip
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24})
    processor = transformers.LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1,
    )  # fmt: skip
    random = np.random.default_rng(0)
    pictures = [Image.fromarray(random.integers(0, 255, (30, 26, 3), dtype=np.uint8)) for _ in range(60)]
    encoder = transformers.ViTModel(transformers.ViTConfig(**SMALL, image_size=32, patch_size=8)).eval()
    return {
        "vlm": transformers.LlavaForConditionalGeneration(config).eval(), "processor": processor, "images": pictures,
        "captions": [f"{WORDS[i % 7]} {WORDS[i % 5]}" for i in range(60)], "projector": "model.multi_modal_projector",
        "encoder": hf_stitch.load(encoder, processor=transformers.ViTImageProcessor(size={"height": 32, "width": 32})),
    }  # fmt: skip


def exchanged() -> Namespace:
    """A network that describes images, another encoder, and images."""
    given = towers()
    tower = transformers.CLIPVisionConfig(**{**SMALL, "hidden_size": 24}, image_size=24, patch_size=8)
    return {
        **given, "other": transformers.CLIPVisionModel(tower).eval(), "of_images": given["processor"].image_processor,
    }  # fmt: skip


def merged() -> Namespace:
    """Decoders of two architectures with one tokenizer, one with another tokenizer, and texts."""
    one, other = llama(hidden_size=24, num_attention_heads=2), gpt2(n_embd=16, n_layer=3, n_head=2)
    return {
        "llama": one, "gpt2": other, "tokenizer": plain_tokenizer(), "other": of_texts(one), "texts": words_of(60),
    }  # fmt: skip


def train_a_stitched_model() -> Namespace:
    """A stitched classifier of texts, its target, and tokenized and raw texts."""
    source, target = text_network("bert"), text_network("bert", 1)
    tokenizer, layers = plain_tokenizer(), dict.fromkeys(("source_layer", "target_layer"), "bert.encoder.layer.1")
    train, test = (
        sentences(40, seed).map(lambda each: tokenizer(each["text"], truncation=True), remove_columns=["text"])
        for seed in (1, 2)
    )
    return {
        "stitched": hf_stitch.stitch(source, target, sentences(60), **layers, progress=False), "target": target,
        "tokenizer": tokenizer, "train": train, "test": test, "held_out": sentences(40, 3),
    }  # fmt: skip


def programs() -> Namespace:
    """The folder of a stitched classifier of texts."""
    pytest.importorskip("peft")
    warnings.simplefilter("ignore", FutureWarning)  # in the whole test: peft reads what transformers 5.24 renamed
    train_a_stitched_model()["stitched"].save_pretrained("stitched")
    return {}


def stitch(architecture: str = "resnet18") -> Namespace:
    """A CNN and a ViT, three stitched models, two language models, and two seeds of one architecture."""
    source, target = _loaded(0, architecture), _vision_target()
    again = partial(_loaded, 0, architecture)
    dataset = pictures(60)
    train, held_out = Samples.of(dataset).split(0.2, 0)
    at = partial(hf_stitch.stitch, source, target, train, target_layer="vit.layers.3", progress=False)
    return {
        "source": source, "target": target, "dataset": dataset, "train": train, "held_out": held_out,
        **{name: partial(at, source_layer=f"layer{i}.0") for i, name in enumerate(("one", "two", "three"), 1)},
        "night_dataset": dataset, "names": [f"scene {i}" for i in range(len(dataset))],
        "gpt2": partial(text_network, "gpt2"), "other": partial(text_network, "gpt2", 1),
        "texts": sentences(40), "tokenizer": plain_tokenizer(), "seed_0": again("0"),
        "seed_1": _loaded(1, architecture), "test": held_out, "pairs": dataset,
        "before": again("before"), "after": again("after"),
        "llama": partial(decoder, "llama"), "gpt2_small": partial(decoder, "gpt2"),
    }  # fmt: skip


def train() -> Namespace:
    """A ViT, training data for a Trainer or a loop, and a reference network."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    processor, labelled = vit_processor(), pictures(24, seed=1)
    examples = [
        {"pixel_values": processor(row["image"], return_tensors="pt")["pixel_values"][0], "labels": row["label"]}
        for row in pictures(16)
    ]
    adapter = hf_stitch.load(vit(), processor=processor)
    return {
        "Trainer": transformers.Trainer, "model": adapter.model, "train": examples, "test": examples,
        "args": transformers.TrainingArguments(
            "run/trainer", num_train_epochs=2, report_to=[], disable_tqdm=True, use_cpu=True, eval_strategy="epoch"
        ),
        "probe": labelled.remove_columns("label"), "labelled": labelled, "reference": _loaded(),
        "loader": DataLoader([row["pixel_values"] for row in examples], batch_size=8),
        "accelerator": Accelerator(cpu=True), "processor": processor,
    }  # fmt: skip


def trust_a_metric() -> Namespace:
    """Rows of two networks with a common component."""
    random = np.random.default_rng(0)
    common = random.normal(size=(40, 1, 4))
    x, y = (
        (common @ random.normal(size=(4, 6)) + random.normal(size=(40, 3, 6))).reshape(120, 6).astype(np.float32)
        for _ in range(2)
    )
    values = random.random((4, 4))
    return {
        "x": x, "y": y, "samples": np.repeat(np.arange(40), 3), "between_01": values, "between_02": values.T,
        "batches": [(x[:60], y[:60]), (x[60:], y[60:])],
    }  # fmt: skip


def transfer() -> Namespace:
    """Two language models, what was found in the first of them, and activations of the second."""
    from hf_stitch_transfer import SparseAutoencoder

    width = 12
    return {
        "a": decoder("gpt2"), "b": decoder("gpt2"), "layer": "transformer.h.0", "texts": sentences(40),
        "probe": torch.nn.Linear(width, 3), "direction": torch.randn(width), "activations_of_b": torch.randn(5, width),
        "autoencoder": SparseAutoencoder(width, 24),
    }  # fmt: skip


def trust_a_stitch() -> Namespace:
    """A stitched model, and other stitching layers at the same cuts."""
    from hf_stitch.training import TaskLoss

    source, target = _loaded(), _vision_target()
    train, test = Samples.of(pictures(240)).split(0.5, 0)
    place: Any = {"source_layer": "layer2.0", "target_layer": "vit.layers.3", "progress": False}
    stitched = hf_stitch.stitch(source, target, train, **place)
    first, second = (TaskLoss(epochs=1, seed=seed).fit(stitched, train, progress=False) for seed in range(2))
    bottleneck = hf_stitch.stitch(source, target, train, matcher="low_rank", rank=4, **place)
    return {
        "stitched": stitched, "train": train, "test": test, "first": first, "second": second, "other": bottleneck,
        "noise": pictures(60, seed=9), "source": source, "target": target,
        "bottlenecks": {4: bottleneck.stitch},
    }  # fmt: skip


def vectors(count: int, hidden: int, *widths: int) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    common = random.normal(size=(count, hidden))
    return [np.tanh(common @ random.normal(size=(hidden, width)) / 3).astype(np.float32) for width in widths]


def embeddings() -> Namespace:
    """Vectors of the same texts by two encoders, as files and arrays, and relevant documents of the queries."""
    import faiss

    sides = dict(zip(("old", "new"), vectors(900, 6, 16, 24), strict=True))
    parts = {"documents": slice(500, 800), "queries": slice(850, 900), "recent": slice(700, 900)}
    for side, rows in sides.items():
        np.save(f"pairs_{side}.npy", rows[:500])
        for name, some in parts.items():
            np.save(f"{name}_{side}.npy", rows[some])
    index = faiss.IndexFlatIP(16)
    index.add(sides["old"][500:850])
    faiss.write_index(index, "index.faiss")
    return {
        "faiss": faiss,
        **{f"{side}_documents": rows[500:850] for side, rows in sides.items()},
        **{f"{side}_queries": rows[850:] for side, rows in sides.items()},
        "labels": [{document: 1} for document in np.random.default_rng(0).integers(350, size=50).tolist()],
    }


def vector_store() -> Namespace:
    """The module of the page's store, which its test imports."""
    page = (Path(__file__).parents[2] / "docs/plugins/store.md").read_text()
    module = ModuleType("sqlite_store")
    exec(page.partition("```python\n# sqlite_store.py\n")[2].partition("```")[0], vars(module))
    sys.modules.setdefault("sqlite_store", module)
    return {}


def word_vectors() -> Namespace:
    """Two files of vectors with the same words, and two small vocabularies with their translations."""
    random = np.random.default_rng(0)
    words = [f"{first}{second}ing" for first in "abcdefghijklmnopqrst" for second in "abcdefghijklmnopqrst"]
    lines = [f"{word} " + " ".join(f"{value:.4f}" for value in random.normal(size=8)) for word in words]
    Path("glove.6B.100d.txt").write_text("\n".join(lines) + "\n")
    with gzip.open("cc.en.300.vec.gz", "wt") as file:
        file.write(f"{len(lines)} 8\n" + "\n".join(lines) + "\n")
    vectors = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    known = ["house", "tree", *(f"word{i}" for i in range(38))]
    english = WordVectors.of(known, vectors)
    spanish = WordVectors.of([*known[2:], "casa", "árbol"], vectors.roll(-2, 0))
    held_out = [(f"word{i}", f"word{i}") for i in range(20, 30)]
    pairs = [(f"word{i}", f"word{i}") for i in range(20)]
    return {"english": english, "spanish": spanish, "held_out_pairs": held_out, "pairs": pairs}


def own_networks() -> Namespace:
    """A network, its transform and some texts; and the file of the page, with the weights that it writes."""
    page = (Path(__file__).parents[2] / "docs/how-to/own-networks.md").read_text()
    code = page.partition("```python\n# mine.py\n")[2].partition("```")[0]
    Path("mine.py").write_text(code)
    defined: Namespace = {}
    exec(code, defined)
    defined["train"](8, 0, epochs=1)
    torch.save(defined["CNN"](16).state_dict(), "16-1.pt")
    return {"net": defined["CNN"](8), "transform": defined["pixels"], "texts": [*sentences(40)["text"], "good", "bad"]}


def errors() -> Namespace:
    """The networks and data of :func:`stitch`, saved models, a network of user code and a head without scores."""
    scene = stitch()
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(3)))
    own = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
    answers = transformers.BertForQuestionAnswering(transformers.BertConfig(**TEXT)).eval()
    inside = {"source_layer": "0", "target_layer": "1", "task": None, "progress": False}
    transformers.BertModel(transformers.BertConfig(**TEXT)).save_pretrained("encoder")
    plain_tokenizer().save_pretrained("encoder")
    shutil.copytree(_written(_models), ".", dirs_exist_ok=True)
    return {
        **scene, "net": net, "stitched": partial(hf_stitch.stitch, own, own, torch.randn(100, 4), **inside),
        "bert": partial(text_network, "bert"), "answers": partial(hf_stitch.load, answers, processor=plain_tokenizer()),
    }  # fmt: skip


def _models() -> None:
    one = stitch()["one"]()
    one.save_pretrained("model")
    one.stitcher.save_pretrained("stitcher")


def port() -> Namespace:
    """A decoder, and its folder for MLX. While OpenVINO traces it, torch and transformers warn of their own names."""
    warnings.simplefilter("ignore", FutureWarning)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for folder in ("port", "org/model"):
        model.save_pretrained(folder)
    return {"original": hf_stitch.load(model, example_inputs={"input_ids": torch.ones(2, 4, dtype=int)})}


class Renamed(torch.nn.Module):
    """A network under other names."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(images)
        return found


def weights() -> Namespace:
    """A network of timm in the class of another package."""
    torch.manual_seed(0)
    return {"original": Renamed(timm.create_model("tf_efficientnet_lite0", pretrained=False)).eval()}


ALONE = (
    "docs/adapters.md",
    *(f"docs/plugins/{page}.md" for page in ("adapter", "contracts", "data", "index")),
    *(f"plugins/hf-stitch-{name}/README.md" for name in ("diagonal", "graphs", "metrics", "pytorch-ood", "testing")),
)
"""Pages that define everything themselves."""

NAMED = (
    bench, compare, lora, own_networks, port, relative, report, programs, same, distil, save, train_a_stitched_model,
    train, trust_a_metric, transfer, trust_a_stitch, weights,
)  # fmt: skip
"""Scenes that have the names of pages."""

PAGES: dict[str, Callable[[], Namespace]] = {
    **dict.fromkeys(ALONE, dict),
    **{f"docs/errors/{page.name}": errors for page in ERRORS if page.stem != "index"},
    **{f"docs/how-to/{scene.__name__.replace('_', '-')}.md": scene for scene in NAMED},
    "README.md": readme,
    "docs/explanation/rows.md": compare,
    "docs/how-to/activations.md": compare,
    "docs/how-to/cut.md": lambda: {"images": pictures(4)["image"]},
    "docs/how-to/gpu.md": partial(stitch, SHORT),
    "docs/how-to/grid.md": stitch,
    "docs/how-to/forms.md": int8,
    "docs/how-to/diff.md": same,
    "docs/how-to/shorten.md": shortened,
    "docs/how-to/share.md": save,
    "docs/how-to/stitch.md": partial(stitch, SHORT),
    "docs/how-to/upgrade-embeddings.md": lambda: dict(zip(("old", "new"), vectors(600, 8, 24, 32), strict=True)),
    "docs/plugins/store.md": vector_store,
    "docs/start.md": readme,
    "plugins/hf-stitch-embeddings/README.md": embeddings,
    "plugins/hf-stitch-filter-atoms/README.md": lambda: {"batches": torch.randn(2, 2, 3, 64, 64)},
    "plugins/hf-stitch-shorten/README.md": shortened,
    "plugins/hf-stitch-studies/README.md": trust_a_stitch,
    "docs/how-to/exchange.md": exchanged,
    "docs/how-to/merge.md": merged,
    "plugins/hf-stitch-towers/README.md": towers,
    "plugins/hf-stitch-transfer/README.md": transfer,
    "plugins/hf-stitch-versions/README.md": same,
    "plugins/hf-stitch-word-vectors/README.md": word_vectors,
}
"""Page with Python snippets -> function that creates its scene."""


def folders() -> dict[str, str]:
    """Write local networks and data sets to the working folder.

    Returns:
        Name in a command of the documentation -> what the test passes instead.
    """
    shutil.copytree(_written(_networks_and_data), ".", dirs_exist_ok=True)
    source, target = "timm/resnet18.a1_in1k", "google/vit-base-patch16-224"
    return {
        "A": source, "B": target, "org/name": target, "SOURCE": source, "TARGET": target,
        "uoft-cs/cifar10": "images", "stanfordnlp/imdb": "texts",
        "google-bert/bert-base-uncased": "bert", "openai-community/gpt2": "gpt2",
    }  # fmt: skip


def _networks_and_data() -> None:
    for name, family in (("bert", "bert"), ("gpt2", "gpt2")):
        adapter = text_network(family)
        adapter.model.save_pretrained(name)
        adapter.processor.save_pretrained(name)
    for name, data in (("images", pictures(60)), ("texts", sentences(40))):
        Path(name).mkdir()
        for split in ("train", "test"):
            data.to_parquet(f"{name}/{split}.parquet")
    for seed in range(3):
        arguments = {"channels": (16, 24, 32, 32), "num_classes": CLASSES}
        timm.models.save_for_hf(cnn(seed), f"SEED{seed}", model_args=arguments, safe_serialization=True)
    hf_stitch.stitch(
        _loaded(), _vision_target(), pictures(60), source_layer="layer2.0", target_layer="vit.layers.3", progress=False
    ).save_pretrained("FOLDER")
