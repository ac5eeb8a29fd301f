"""Folders of stitched models and stitchers, each with an input and its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
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
    """Stitch two networks."""
    return hf_stitch.stitch(
        source, target, data, source_layer=layers[0], target_layer=layers[1], progress=False, **options
    )


def answered(model: StitchedModel, folder: Path, inputs: Mapping[str, Tensor], prompt: str | None = None) -> None:
    """Write a model, and beside it an input and its output; of a decoder, also tokens after a prompt."""
    model.save_pretrained(folder)
    write_answer(model, folder, inputs, prompt)


def write_answer(model: Any, folder: Path, inputs: Mapping[str, Tensor], prompt: str | None = None) -> None:
    """Write an input of a model and its output."""
    found = dict(inputs)
    with torch.no_grad():
        found["output"] = output_of(model(**inputs))
        if prompt is not None:
            found["prompt"] = model.preprocess([prompt])["input_ids"]
            found |= generated(model, found["prompt"])
    save_file({name: value.contiguous() for name, value in found.items()}, f"{folder}.answer.safetensors")


def generated(model: Any, prompt: Tensor) -> dict[str, Tensor]:
    """Return greedily generated tokens and the logits of each."""
    found = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **GREEDY)
    return {"generated": found.sequences, "logits": torch.stack(found.logits)}


def output_of(found: Any) -> Tensor:
    """Return the logits or the last hidden state."""
    if isinstance(found, Tensor):
        return found
    return found.logits if "logits" in found else found.last_hidden_state


# -- networks of user code and images ----------------------------------------------------------------------------------
def stitcher(folder: Path) -> None:
    """A map between networks of user code."""
    a, b = networks()
    data = rows(60)
    stitched = joined(a, b, data, ("1", "1"), matcher="ridge", ridge=1.0, task=None)
    stitched.stitcher.save_pretrained(folder)
    with torch.no_grad():
        save_file({"input": data[:3], "output": stitched(input=data[:3])}, f"{folder}.answer.safetensors")


def model(folder: Path) -> None:
    """A classifier of images."""
    data = images()
    whole = joined(vit(0), vit(1), data, (LAYER["vit"],) * 2)
    answered(whole, folder, {"pixel_values": torch.stack([each["image"] for each in data[:3]])})


def model_of_timm(folder: Path) -> None:
    """A classifier of images whose first half is of timm."""
    data = images()
    whole = joined(timm_vit(), vit(1), data, ("blocks.0", LAYER["vit"]))
    answered(whole, folder, {"pixel_values": torch.stack([each["image"] for each in data[:3]])})


def rewritten(folder: Path) -> None:
    """A classifier of images, a half of which was rewritten by a plugin."""
    data, nets = images(16), (resnet(0), resnet(1))
    atomize(nets[0], atoms=4)
    a, b = (hf_stitch.load(net, example_inputs=torch.zeros(2, 1, 16, 16)) for net in nets)
    whole = joined(a, b, data, ("resnet.encoder.stages.0.layers.0",) * 2)
    answered(whole, folder, {"pixel_values": torch.stack([each["image"] for each in data[:3]])})


# -- texts -------------------------------------------------------------------------------------------------------------
def text_classifier(folder: Path) -> None:
    """A classifier of texts, with its tokenizer and a stitch of low rank."""
    whole = joined(bert(0), bert(1), texts(), (LAYER["bert"],) * 2, matcher="low_rank", rank=4)
    answered(whole, folder, inputs_of(whole))


def encoder(folder: Path) -> None:
    """A network of texts without a task."""
    pair = (bert(seed, "BertModel") for seed in range(2))
    whole = joined(*pair, texts(), ("encoder.layer.0", "encoder.layer.1"), task=None)
    answered(whole, folder, inputs_of(whole))


def inputs_of(whole: StitchedModel, count: int = 3) -> dict[str, Tensor]:
    """Return the inputs of the first texts."""
    return dict(whole.preprocess([each["text"] for each in texts()[:count]]))


@cache
def decoders() -> StitchedModel:
    """Stitch GPT-2 to Llama."""
    return joined(gpt2(), llama(), texts(), (LAYER["gpt2"], LAYER["llama"]), matcher="ridge")


@cache
def chain() -> StitchedModel:
    """Stitch :func:`decoders` to another GPT-2."""
    source = hf_stitch.load(decoders())
    return joined(source, gpt2(2), texts(), (f"target.{LAYER['llama']}", LAYER["gpt2"]), matcher="ridge")


def language_model(folder: Path) -> None:
    """A language model of two decoders, with a tokenizer and a generation config of its own."""
    answered(decoders(), folder, inputs_of(decoders()), PROMPT)


def language_stitcher(folder: Path) -> None:
    """The map of :func:`language_model`."""
    decoders().stitcher.save_pretrained(folder)
    write_answer(decoders(), folder, inputs_of(decoders()), PROMPT)


def language_model_of_an_encoder(folder: Path) -> None:
    """A language model whose first half is an encoder: it generates without a cache."""
    whole = joined(t5(), gpt2(), texts(), (LAYER["t5"], LAYER["gpt2"]))
    answered(whole, folder, inputs_of(whole), PROMPT)


def language_chain(folder: Path) -> None:
    """A stitched model that is stitched again."""
    answered(chain(), folder, inputs_of(chain()), PROMPT)


def chain_stitcher(folder: Path) -> None:
    """The last map of :func:`language_chain`."""
    chain().stitcher.save_pretrained(folder)
    write_answer(chain(), folder, inputs_of(chain()), PROMPT)


# -- two tokenizers ----------------------------------------------------------------------------------------------------
@cache
def own_tokens() -> StitchedModel:
    """Stitch two decoders with different tokenizers; the source reads its own tokens."""
    layers = ("model.layers.1", LAYER["gpt2"])
    return joined(
        llama(3, fine()), gpt2(4, coarse()), SENTENCES, layers, matcher="ridge", align="prefix", own=True,
    )  # fmt: skip


def two_tokenizers(folder: Path) -> None:
    """A language model of two tokenizers, in format 3."""
    whole = own_tokens()
    answered(whole, folder, dict(whole.preprocess(SENTENCES[:3])), "the walker is")


def two_tokenizers_stitcher(folder: Path) -> None:
    """The map of :func:`two_tokenizers`, in format 3."""
    whole = own_tokens()
    whole.stitcher.save_pretrained(folder)
    write_answer(whole, folder, dict(whole.preprocess(SENTENCES[:3])), "the walker is")


# -- relative representations ------------------------------------------------------------------------------------------
@cache
def anchors() -> AnchorSet:
    """Encode twelve images by two networks."""
    samples = hf_stitch.Samples.of(images()).take(12)
    found = AnchorSet.of(samples)
    for seed, pooling in ((0, "mean"), (0, "cls"), (1, "cls")):
        found = found.encode(vit(seed), "vit.layers.1", samples, pooling, progress=False)
    return found


@cache
def made_head() -> Head:
    """Build a head of similarities to the anchors."""
    torch.manual_seed(0)
    return Head(HeadConfig(in_features=12, hidden_size=5, num_labels=3)).eval()


@cache
def relative_model() -> StitchedModel:
    """Put the head on the similarities to the anchors."""
    return hf_stitch.relative_model(
        vit(0), anchors(), layer="vit.layers.1", center=True, head=made_head(), task="image-classification",
        progress=False,
    )  # fmt: skip


@cache
def swapped_model() -> StitchedModel:
    """Exchange the encoder of :func:`relative_model`."""
    return hf_stitch.swap(relative_model(), encoder=vit(1), encoder_layer="vit.layers.1", pooling="cls", progress=False)


def pixels() -> dict[str, Tensor]:
    """Return images that are no anchors."""
    return {"pixel_values": torch.stack([each["image"] for each in images()[20:23]])}


def head(folder: Path) -> None:
    """A head alone."""
    made_head().save_pretrained(folder)
    write_answer(made_head(), folder, {"features": rows(3, 12)})


def relative(folder: Path) -> None:
    """A relative model with its anchors."""
    answered(relative_model(), folder, pixels())


def relative_stitcher(folder: Path) -> None:
    """The projection of :func:`relative` with its anchors."""
    relative_model().stitcher.save_pretrained(folder)
    write_answer(relative_model(), folder, pixels())


def swapped(folder: Path) -> None:
    """A relative model with another encoder."""
    answered(swapped_model(), folder, pixels())


def inverse(folder: Path) -> None:
    """An absolute model whose encoder was exchanged by means of anchors."""
    model = hf_stitch.swap(
        vit(0), encoder=vit(1), anchors=anchors(), encoder_layer="vit.layers.1", target_layer="vit.layers.1",
        pooling="cls", progress=False,
    )  # fmt: skip
    answered(model, folder, pixels())


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
    """Networks that a stitcher is attached to, as transformers writes them."""
    for name, build in PARENTS.items():
        network: Any = build()
        network.model.save_pretrained(folder / name)
        if network.interface.modality == "text":
            network.processor.save_pretrained(folder / name)


MODELS: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (
        stitcher, model, model_of_timm, rewritten, text_classifier, encoder, language_model, language_stitcher,
        language_model_of_an_encoder, language_chain, chain_stitcher, two_tokenizers, two_tokenizers_stitcher, head,
        relative, relative_stitcher, swapped, inverse, parents,
    )
}  # fmt: skip
"""Name of a folder -> function that writes it."""
