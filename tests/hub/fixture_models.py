"""Folders of stitched models and stitchers, each with an input and its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from fixture_networks import (
    LAYER,
    SENTENCES,
    bert,
    coarse,
    fine,
    gpt2,
    images,
    llama,
    networks,
    resnet,
    rows,
    t5,
    texts,
    timm_vit,
    vit,
)
from hf_stitch_filter_atoms import atomize
from safetensors.torch import save_file
from torch import Tensor

import hf_stitch
from hf_stitch import Adapter, StitchedModel
from hf_stitch.artefacts import Head, HeadConfig
from hf_stitch.relative import AnchorSet

GREEDY = {
    "do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "output_logits": True,
    "return_dict_in_generate": True,
}  # fmt: skip
"""The penalty of repetitions is that of the model's generation config."""
PROMPT = "w1 w2 w3 w4"


def joined(source: Adapter, target: Adapter, data: Any, layers: tuple[str, str], **options: Any) -> StitchedModel:
    return hf_stitch.stitch(
        source, target, data, source_layer=layers[0], target_layer=layers[1], progress=False, **options
    )


def write_answer(model: Any, folder: Path, inputs: Mapping[str, Tensor], prompt: str | None = None) -> None:
    found = dict(inputs)
    with torch.no_grad():
        found["output"] = output_of(model(**inputs))
        if prompt is not None:
            found["prompt"] = model.preprocess([prompt])["input_ids"]
            found |= generated(model, found["prompt"])
    save_file({name: value.contiguous() for name, value in found.items()}, f"{folder}.answer.safetensors")


def generated(model: Any, prompt: Tensor) -> dict[str, Tensor]:
    found = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **GREEDY)
    return {"generated": found.sequences, "logits": torch.stack(found.logits)}


def output_of(found: Any) -> Tensor:
    if isinstance(found, Tensor):
        return found
    return found.logits if "logits" in found else found.last_hidden_state


def stitcher(folder: Path) -> None:
    data = rows(60)
    stitched = joined(*networks(), data, ("1", "1"), matcher="ridge", ridge=1.0, task=None)
    stitched.stitcher.save_pretrained(folder)
    with torch.no_grad():
        save_file({"input": data[:3], "output": stitched(input=data[:3])}, f"{folder}.answer.safetensors")


# -- anchors and a head ------------------------------------------------------------------------------------------------
@cache
def anchors() -> AnchorSet:
    samples = hf_stitch.Samples.of(images()).take(12)
    found = AnchorSet.of(samples)
    for seed, pooling in ((0, "mean"), (0, "cls"), (1, "cls")):
        found = found.encode(vit(seed), "vit.layers.1", samples, pooling, progress=False)
    return found


@cache
def made_head() -> Head:
    torch.manual_seed(0)
    return Head(HeadConfig(in_features=12, hidden_size=5, num_labels=3)).eval()


def head(folder: Path) -> None:
    made_head().save_pretrained(folder)
    write_answer(made_head(), folder, {"features": rows(3, 12)})


# -- stitched models ---------------------------------------------------------------------------------------------------
def rewritten() -> StitchedModel:
    nets = resnet(0), resnet(1)
    atomize(nets[0], atoms=4)
    a, b = (hf_stitch.load(net, example_inputs=torch.zeros(2, 1, 16, 16)) for net in nets)
    return joined(a, b, images(16), ("resnet.encoder.stages.0.layers.0",) * 2)


def language_chain() -> StitchedModel:
    source = hf_stitch.load(made("language_model"))
    return joined(source, gpt2(2), texts(), (f"target.{LAYER['llama']}", LAYER["gpt2"]), matcher="ridge")


def relative() -> StitchedModel:
    options: dict[str, Any] = {"head": made_head(), "task": "image-classification", "progress": False}
    return hf_stitch.relative_model(vit(0), anchors(), layer="vit.layers.1", center=True, **options)


def swapped(model: Any, **options: Any) -> StitchedModel:
    encoder: dict[str, Any] = {"encoder": vit(1), "encoder_layer": "vit.layers.1", "pooling": "cls"}
    return hf_stitch.swap(model, progress=False, **encoder, **options)


def pixels(size: int = 4, first: int = 0) -> dict[str, Tensor]:
    return {"pixel_values": torch.stack([each["image"] for each in images(size)[first : first + 3]])}


def words(whole: StitchedModel) -> dict[str, Tensor]:
    return dict(whole.preprocess([each["text"] for each in texts()[:3]]))


Inputs = Callable[[StitchedModel], Mapping[str, Tensor]]

WHOLE: dict[str, tuple[Callable[[], StitchedModel], Inputs, str | None]] = {
    "model": (lambda: joined(vit(0), vit(1), images(), (LAYER["vit"],) * 2), lambda _: pixels(), None),
    "model_of_timm": (
        lambda: joined(timm_vit(), vit(1), images(), ("blocks.0", LAYER["vit"])), lambda _: pixels(), None,
    ),
    "rewritten": (rewritten, lambda _: pixels(16), None),
    "text_classifier": (
        lambda: joined(bert(0), bert(1), texts(), (LAYER["bert"],) * 2, matcher="low_rank", rank=4), words, None,
    ),
    "encoder": (
        lambda: joined(
            *(bert(seed, "BertModel") for seed in range(2)), texts(), ("encoder.layer.0", "encoder.layer.1"), task=None
        ),
        words, None,
    ),
    "language_model": (
        lambda: joined(gpt2(), llama(), texts(), (LAYER["gpt2"], LAYER["llama"]), matcher="ridge"), words, PROMPT,
    ),
    "language_model_of_an_encoder": (  # it generates without a cache
        lambda: joined(t5(), gpt2(), texts(), (LAYER["t5"], LAYER["gpt2"])), words, PROMPT,
    ),
    "language_chain": (language_chain, words, PROMPT),
    "two_tokenizers": (  # the source reads its own tokens; in format 3
        lambda: joined(
            llama(3, fine()), gpt2(4, coarse()), SENTENCES, ("model.layers.1", LAYER["gpt2"]), matcher="ridge",
            align="prefix", own=True,
        ),
        lambda whole: dict(whole.preprocess(SENTENCES[:3])), "the walker is",
    ),
    "relative": (relative, lambda _: pixels(first=20), None),
    "swapped": (lambda: swapped(made("relative")), lambda _: pixels(first=20), None),
    "inverse": (
        lambda: swapped(vit(0), anchors=anchors(), target_layer="vit.layers.1"), lambda _: pixels(first=20), None,
    ),
}  # fmt: skip
"""Name of a folder -> what makes a stitched model, its inputs, and the prompt of a decoder."""

STITCHERS = {
    "language_stitcher": "language_model", "chain_stitcher": "language_chain", "relative_stitcher": "relative",
    "two_tokenizers_stitcher": "two_tokenizers",
}  # fmt: skip
"""Name of the folder of a map -> that of its model."""


@cache
def made(name: str) -> StitchedModel:
    return WHOLE[name][0]()


def write(name: str, folder: Path) -> None:
    """Write a model or its map, and beside it an input and its output; of a decoder, also tokens after a prompt."""
    whole = STITCHERS.get(name, name)
    _, inputs, prompt = WHOLE[whole]
    model = made(whole)
    (model.stitcher if name in STITCHERS else model).save_pretrained(folder)
    write_answer(model, folder, inputs(model), prompt)


# -- networks that tests need again ------------------------------------------------------------------------------------
PARENTS: dict[str, Callable[[], Adapter]] = {
    "gpt2": gpt2,
    "gpt2_2": lambda: gpt2(2),
    "gpt2_coarse": lambda: gpt2(4, coarse()),
    "llama": llama,
    "llama_fine": lambda: llama(3, fine()),
    "vit": vit,
    "vit_1": lambda: vit(1),
}


def parents(folder: Path) -> None:
    """Write networks that a stitcher is attached to, as transformers writes them."""
    for name, build in PARENTS.items():
        network: Any = build()
        network.model.save_pretrained(folder / name)
        if network.interface.modality == "text":
            network.processor.save_pretrained(folder / name)


MODELS: dict[str, Callable[[Path], None]] = {
    "stitcher": stitcher, **{name: partial(write, name) for name in (*WHOLE, *STITCHERS)}, "head": head,
    "parents": parents,
}  # fmt: skip
"""Name of a folder -> function that writes it."""
