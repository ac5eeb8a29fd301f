"""A network larger than the memory: listed, cut, compared, stitched, saved and loaded with weights on the disk.

Random weights in bfloat16 are written file by file. Every step runs in a separate process and measures its peak of
anonymous memory, minus the memory after the imports: pages of mapped files, which the system can drop, do not count.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
import transformers as hf
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.timing import alone, show

TEXTS = 64
SIZES = {"large": (28, 1536, 8960, 12, 2, 151936), "small": (4, 64, 128, 4, 2, 80)}
"""Layers, hidden size, intermediate size, heads, heads of keys and values, vocabulary size."""
LAYER, WORDS = "model.layers.{}", 80


def config_of(name: str) -> hf.LlamaConfig:
    """Return the config of a size."""
    layers, width, inner, heads, keys, words = SIZES[name]
    return hf.LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=keys, tie_word_embeddings=False, pad_token_id=0,
        dtype="bfloat16",
    )  # fmt: skip


def write_model(name: str, folder: Path) -> None:
    """Write random weights, one file per block, so that the whole model is never in memory."""
    config = config_of(name)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        skeleton = hf.LlamaForCausalLM(config)
    groups: dict[str, list[str]] = {}
    for key in skeleton.state_dict():
        part = key.partition(".layers.")[2].partition(".")[0]
        groups.setdefault(f"layer-{part}" if part else key, []).append(key)
    index, generator = {}, torch.Generator().manual_seed(0)
    for number, keys in enumerate(groups.values(), 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        shapes = {key: skeleton.get_parameter(key).shape for key in keys}
        tensors = {
            key: torch.ones(shape, dtype=torch.bfloat16) if len(shape) == 1
            else torch.randn(shape, generator=generator, dtype=torch.bfloat16) * 0.02
            for key, shape in shapes.items()
        }  # fmt: skip
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(keys, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{i}": i + 2 for i in range(WORDS - 2)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)


def anonymous_gb() -> float:
    """Return the anonymous memory of this process in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1e6


def peak_of(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Run a function; return its result, its seconds, and its peak of anonymous memory above the start, in GB."""
    peak, ended, before = [anonymous_gb()], Event(), anonymous_gb()

    def watch() -> None:
        while not ended.wait(0.01):
            peak[0] = max(peak[0], anonymous_gb())

    thread = Thread(target=watch, daemon=True)
    thread.start()
    start = time.perf_counter()
    try:
        result = work()
    finally:
        ended.set()
        thread.join()
    return result, time.perf_counter() - start, peak[0] - before


def texts(count: int) -> list[str]:
    """Return texts of random words."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 12, (count,), generator=generator).tolist()
    rows = [torch.randint(0, WORDS - 2, (length,), generator=generator).tolist() for length in lengths]
    return [" ".join(f"w{word}" for word in row) for row in rows]


def step(name: str, folder: Path) -> dict[str, Any]:
    """Run a step in this process."""
    warnings.simplefilter("ignore")
    import hf_stitch

    data = texts(TEXTS)
    deep = LAYER.format(json.loads((folder / "large" / "config.json").read_text())["num_hidden_layers"] - 3)

    def load(which: str) -> Any:
        if which == "small":
            return hf_stitch.load(str(folder / "small"))
        model = hf.AutoModelForCausalLM.from_pretrained(
            folder / "large", device_map={"": "disk"}, offload_folder=folder / "disk", dtype=torch.bfloat16
        )
        return hf_stitch.load(model, processor=hf.AutoTokenizer.from_pretrained(folder / "large"))

    def run() -> str:
        if name == "load from its files":
            model = hf_stitch.StitchedModel.from_pretrained(folder / "stitched", device_map={"": "disk"})
            inputs = model.processor(data[:2], return_tensors="pt", padding=True, return_token_type_ids=False)
            return f"logits of shape {tuple(model(**inputs).logits.shape)}"
        large = load("large")
        if name == "list the layers":
            return f"{len(large.layers)} layers"
        if name == "verify a cut":
            return str(large.verify_cut(deep).status)
        if name == "compare two layers":
            small = load("small")
            summary = hf_stitch.compare(
                large, small, data, layers_a=[LAYER.format(1), deep], layers_b=[LAYER.format(1)], progress=False
            )
            return f"CKA {', '.join(f'{similarity:.3f}' for similarity in summary.values['linear_cka'].ravel())}"
        stitched = hf_stitch.stitch(
            load("small"), large, data, source_layer=LAYER.format(1), target_layer=LAYER.format(2), batch_size=16
        )
        stitched.save_pretrained(folder / "stitched")
        size = sum(file.stat().st_size for file in (folder / "stitched").glob("*.safetensors"))
        return f"saved {size / 1e9:.2f} GB"

    summary, seconds, peak = peak_of(run)
    return {"step": name, "found": summary, "seconds": f"{seconds:.1f}", "peak": f"{peak:.2f}"}


STEPS = ("list the layers", "verify a cut", "compare two layers", "stitch and save", "load from its files")


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in SIZES:
            (folder / size).mkdir()
            write_model(size, folder / size)
        total = sum(file.stat().st_size for file in (folder / "large").glob("*.safetensors")) / 1e9
        rows = ([*json.loads(alone("offload", step_name, name)).values()] for step_name in STEPS)
        show(f"a model of {total:.1f} GB on the disk", ("step", "found", "seconds", "peak GB above the imports"), rows)


if __name__ == "__main__":
    print(json.dumps(step(sys.argv[1], Path(sys.argv[2]))))
