"""Generation of stitched language models, compared with their networks alone, without a cache, and with left padding.

``python -m benchmarks generation`` measures pairs of four families with random weights. A network that is stitched to
itself with the identity must generate the same text as alone. ``python -m benchmarks.generation zoo FILE`` tests this
with every causal type of transformers, each in a separate process, and appends one line of JSON per type.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

import hf_stitch
from benchmarks import tiny, zoo
from benchmarks.timing import show
from hf_stitch.artefacts.joining import join
from hf_stitch.stitches import IdentityStitch, StitchingLayer

TOKENS = 24
GREEDY = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
WORDS = [f"w{i}" for i in range(500)]
SIZES = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 512}
GROUPED = {**SIZES, "num_key_value_heads": 4}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 504}
FAMILIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "gpt2": ("transformer.h.2", lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=256, n_layer=6, n_head=8, **IDS))),
    "llama": ("model.layers.2", lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, **IDS))),
    "qwen3": ("model.layers.2", lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, **IDS))),
    "t5": ("encoder.block.2", lambda: transformers.T5EncoderModel(transformers.T5Config(
        d_model=256, num_layers=6, num_heads=8, d_ff=512, d_kv=32, **IDS))),
}  # fmt: skip
"""Family -> a cut in the middle, and a function that creates a network."""


def tokenizer(seed: int) -> Any:
    """Return a tokenizer of words; the seed determines the order of their ids."""
    words = random.Random(seed).sample(WORDS, len(WORDS))
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "<s>", "</s>", "[UNK]", *words])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "[UNK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **special)


def network(family: str, seed: int, words: int = 0) -> hf_stitch.Adapter:
    """Return a network with random weights."""
    torch.manual_seed(seed)
    return hf_stitch.load(FAMILIES[family][1]().eval(), processor=tokenizer(words))


def texts(count: int, words: int) -> list[str]:
    """Return texts of random words."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=words)) for _ in range(count)]


def run(model: Any, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor, float]:
    """Return the new tokens, their logits (tokens, batch, vocabulary), and the seconds per token."""
    start = time.perf_counter()
    output = model.generate(**inputs, max_new_tokens=TOKENS, **{**GREEDY, **options})
    seconds = (time.perf_counter() - start) / TOKENS
    return output.sequences[:, -TOKENS:], torch.stack(output.logits), seconds


def same(a: tuple[Tensor, Tensor, float], b: tuple[Tensor, Tensor, float]) -> str:
    """Return whether two runs have the same tokens, and the largest difference of their logits."""
    return f"{'equal' if torch.equal(a[0], b[0]) else 'DIFFERENT'} {float((a[1] - b[1]).abs().max()):.0e}"


def row(model: Any, prompts: list[str], plain: Any = None) -> list[str]:
    """Measure one model; compare it with its network if it is stitched to itself."""
    batch = {name: model.processor(prompts, padding=True, return_tensors="pt")[name] for name in NAMES}
    alone = [{name: model.processor([text], return_tensors="pt")[name] for name in NAMES} for text in prompts]
    run(model, alone[0])  # the first time, the cache is checked
    with_cache, without = run(model, batch), run(model, batch, use_cache=False)
    singles = [run(model, outcome) for outcome in alone]
    together = torch.cat([outcome[0] for outcome in singles]), torch.cat([outcome[1] for outcome in singles], 1), 0.0
    network = None if plain is None else run(plain, batch)
    return [
        "–" if network is None else same(with_cache, network),
        same(with_cache, without),
        same(with_cache, together),
        *(f"{1000 * outcome[2]:.1f}" for outcome in (with_cache, without)),
        "–" if network is None else f"{1000 * network[2]:.1f}",
        "no" if model.uncached else "yes",
    ]


NAMES = ("input_ids", "attention_mask")


def rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each pair."""
    prompts = [*texts(1, 100), *texts(1, 64)]
    options: Any = {"matcher": "ridge", "task": "text-generation", "progress": False}
    for source, target in product(FAMILIES, [family for family in FAMILIES if family != "t5"]):
        a = network(source, 0)
        b = a if source == target else network(target, 1)
        matcher = {"matcher": "identity"} if a is b else {}
        model = hf_stitch.stitch(a, b, texts(40, 10), source_layer=FAMILIES[source][0],
                                 target_layer=FAMILIES[target][0], **{**options, **matcher})  # fmt: skip
        yield source, target, *row(model, prompts, a.model if a is b else None)
    a, b = network("gpt2", 0, words=1), network("llama", 1)
    model = hf_stitch.stitch(a, b, texts(40, 10), source_layer=FAMILIES["gpt2"][0], target_layer=FAMILIES["llama"][0],
                             align="prefix", own=True, **options)  # fmt: skip
    yield "gpt2, other tokenizer", "llama", *row(model, prompts)


def main() -> None:
    """Print the table of all pairs."""
    zoo.quiet()
    title = f"transformers {transformers.__version__}, {TOKENS} tokens after prompts of 100 and 64"
    columns = "source", "target", "stitched / network", "with / without cache", "padded / alone"
    show(title, (*columns, "ms per token", "without cache", "network", "cache"), rows())


def examine(family: str) -> dict[str, Any]:
    """Stitch a causal type to itself with the identity; generate with a cache, without, and with the plain network."""
    record: dict[str, Any] = {"family": family}
    try:
        adapter = zoo.adapter_of("causal", family)
        record["cuts"] = len(adapter.layers)
        if not adapter.layers:
            return record
        cut = adapter.layers[len(adapter.layers) // 2]
        spec = adapter.spec(cut)
        stitch = StitchingLayer(spec, spec, "none", IdentityStitch(spec.width, spec.width))
        model: Any = join(adapter, cut, stitch, adapter, cut, task="text-generation")
        prompt = {"input_ids": torch.tensor([[7, 12, 30, 9, 25], [0, 0, 40, 41, 42]])}
        prompt["attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
        for name, inputs in (("text", {"input_ids": prompt["input_ids"][:1]}), ("padded", prompt)):
            runs, plain = {}, {"use_cache": False}
            for variant, network, options in (
                ("cache", model, {}),
                ("plain", model, plain),
                ("network", adapter.model, {}),
            ):
                try:
                    runs[variant] = run(network, inputs, pad_token_id=0, **options)
                except Exception as error:
                    record[f"{name}: {variant}"] = f"{type(error).__name__}: {error}"[:200]
            for reference in ("plain", "network"):
                if {"cache", reference} <= runs.keys():
                    close = torch.allclose(runs["cache"][1], runs[reference][1], rtol=1e-3, atol=1e-3)
                    record[f"{name}: cache / {reference}"] = close and torch.equal(runs["cache"][0], runs[reference][0])
        record["uncached"] = model.uncached
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {error}"[:200]
    return record


def sweep(path: Path) -> None:
    """Examine each causal type in a separate process."""
    zoo.quiet()
    for family in tiny.types("causal"):
        record = {"family": family, **zoo.apart(partial(examine, family), 120)}
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sweep(Path(sys.argv[2])) if sys.argv[1:2] == ["zoo"] else main()
