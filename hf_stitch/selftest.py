"""Self-test of an installation on tiny networks with random weights, without downloads."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import timm
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import hf_stitch
from hf_stitch.artefacts.cache import NAME
from hf_stitch.artefacts.joining import joined_to_itself
from hf_stitch.resources import one_thread

__all__ = ["self_test"]

LAYER, WORDS, NEW = "model.layers.1", 60, 8  # the cut, the vocabulary without special tokens, the generated tokens
VIT: dict[str, Any] = dict(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=4, num_classes=5)
DECODER: dict[str, Any] = dict(  # with weights as large as these, all earlier tokens matter for the next one
    hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=WORDS + 2,
    initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=1,
)  # fmt: skip
TEXTS = [" ".join(f"w{(7 * row + 11 * word) % WORDS}" for word in range(2 + row % 8)) for row in range(40)]


def self_test(finished: Callable[[str, str], object] = lambda name, error: None) -> dict[str, str]:
    """Check that hf-stitch works with the installed libraries, in a few seconds and offline.

    The parts are cutting a vision transformer of timm and a decoder of transformers, stitching a decoder to itself,
    comparing, generating, saving and loading. All parts run, also after a failure.

    Args:
        finished: Called with the name of each part and its error.

    Returns:
        Name of each part -> class and message of its error; empty if it passed.

    Example:
        >>> set(self_test().values())
        {''}
    """
    errors = {}
    for name, part in PARTS.items():
        errors[name] = ""
        try:
            with one_thread(), torch.no_grad():
                part()
        except Exception as error:  # a library can raise anything
            errors[name] = " ".join(f"{type(error).__name__}: {error}".split())
        finished(name, errors[name])
    return errors


@cache
def _vit() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return hf_stitch.load(timm.create_model("vit_tiny_patch16_224", **VIT).eval())


@cache
def _decoder(seed: int) -> Any:
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{f"w{number}": number + 2 for number in range(WORDS)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "padding_side": "left"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)).eval()
    return hf_stitch.load(network, processor=tokenizer)


@cache
def _stitched(target: int) -> Any:
    """Stitch the middle layers by least squares; with random weights, this is not better than a baseline."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is not better than ")
        return hf_stitch.stitch(
            _decoder(0), _decoder(target), TEXTS[:30], test_data=TEXTS[30:], source_layer=LAYER, target_layer=LAYER,
            matcher="lstsq", progress=False,
        )  # fmt: skip


def _require(condition: bool, message: str) -> None:
    """Raise an AssertionError with the message unless the condition is true, also under ``python -O``."""
    if not condition:
        raise AssertionError(message)


def _cut(network: Any, samples: list[Any]) -> None:
    _require(len(network.layers) == 3, f"the network has 3 blocks, but these cuts: {', '.join(network.layers)}")
    inputs = network.preprocess(samples)
    expected = network.model(**inputs) if network is _vit() else network.model(**inputs).logits
    for layer in network.layers:
        stitched: Any = joined_to_itself(network, layer, network.task)
        _require(stitched(**inputs).logits.equal(expected), f"the identity stitch at {layer} changes the outputs")


def _stitch() -> None:
    inputs = _decoder(0).preprocess(TEXTS)
    expected, actual = _decoder(0).model(**inputs).logits, _stitched(0)(**inputs).logits
    gap = ((actual - expected).norm() / expected.norm()).item()
    _require(gap < 1e-3, f"the outputs of a decoder stitched to itself differ by {gap:.1g} from the decoder's outputs")


def _compare() -> None:
    similarity = hf_stitch.compare(_vit(), _vit(), _images(), metrics=["linear_cka"], progress=False)["linear_cka"]
    for layer, cka in zip(_vit().layers, similarity.diagonal(), strict=True):
        _require(abs(cka - 1) < 1e-6, f"the linear CKA of {layer} with itself must be 1, got {cka}")


def _generate() -> None:
    """Compare generation of a padded batch with a cache and of single texts without a cache."""
    model, options = _stitched(1), {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    output = model.generate(**model.preprocess(TEXTS[-3:]), **options, return_dict_in_generate=True)
    _require(output.get(NAME) is not None, "the model does not use a cache: it is missing in the output of generate")
    for text, tokens in zip(TEXTS[-3:], output.sequences[:, -NEW:].tolist(), strict=True):
        single = model.generate(**model.preprocess([text]), **options, use_cache=False)[0, -NEW:].tolist()
        _require(tokens == single, f"{text!r} continues in a padded batch by {tokens}, alone by {single}")


def _save() -> None:
    inputs = _stitched(1).preprocess(TEXTS)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Windows keeps files that are mapped
        _stitched(1).save_pretrained(folder)
        loaded: Any = hf_stitch.StitchedModelForCausalLM.from_pretrained(folder)
        is_equal = loaded(**inputs).logits.equal(_stitched(1)(**inputs).logits)
    _require(is_equal, "the outputs of the loaded model differ from the saved model")


def _images() -> list[torch.Tensor]:
    return list(torch.randn(40, 3, 32, 32, generator=torch.Generator().manual_seed(1)))


PARTS: dict[str, Callable[[], object]] = {
    "cut a vision transformer": lambda: _cut(_vit(), _images()),
    "cut a decoder": lambda: _cut(_decoder(0), TEXTS),
    "stitch a decoder to itself": _stitch,
    "compare a network with itself": _compare,
    "generate with a cache": _generate,
    "save and load": _save,
}
"""Name -> function that raises an error if this part of the installation does not work."""
