"""Planted changes of one block, and whether ``diff`` puts it first; copies without a change, and what it finds there.

Six trained networks: a Tiny-10 and a ResNet-20 (published), a small ViT and a post-norm BERT that classify, a GPT-2 and
a Llama of bytes (trained here, and kept in a temporary folder). Of each, one block is tuned on other data, pruned,
rounded or loses an attention head or some channels; alone, and with all matrices rounded to int8 or int4 on top. The
order of parts by ``diff`` (effect on the outputs alone, and over noise of the same norm) stands beside three cheaper
ones: relative change of weights, and where CKA or the distance of activations jumps most. Copies are roundings, random
adapters of low rank, and a new head: of all parts but the head none should be a finding.

Data and published networks are read from the folder ``HF_STITCH_SHARED``, by default ``../shared``. Install the plugins
``hf-stitch-versions`` and ``hf-stitch-studies``.
"""

from __future__ import annotations

import copy
import os
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import transformers
from hf_stitch_versions import Difference, diff
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hf_stitch
from benchmarks.timing import machine

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("HF_STITCH_SHARED", ROOT.parent / "shared"))
KEPT = Path(tempfile.gettempdir()) / "hf-stitch-benchmark-diff"
sys.path += [str(ROOT / "plugins" / "hf-stitch-studies")]

SAMPLES, LENGTH = 200, 64
"""Samples of a comparison, and bytes of a text."""

OTHER = 10_000
"""Number of bytes or images to tune on."""

Batches = Callable[[int], dict[str, Tensor]]


# -- networks ----------------------------------------------------------------------------------------------------------
@dataclass
class Case:
    """A trained network, what it is tested on, and how a block of it is tuned."""

    model: nn.Module
    samples: Tensor
    name: str  # of the argument
    blocks: list[str]
    tuning: Callable[[nn.Module, str, int], None]  # model, block, steps


@cache
def text(name: str) -> Tensor:
    """Return texts as bytes: English questions, or tweets of a language."""
    place = SHARED / "data" / ("trec" if name == "trec" else f"tweet_sentiment_multilingual/{name}")
    table = pq.read_table(sorted(place.glob("*train*.parquet"))[0])
    joined = "\n".join(table["text"].to_pylist()).encode()
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()


@cache
def questions() -> tuple[Tensor, Tensor]:
    """Return questions as bytes, cut and filled to one length, and their kinds."""
    table = pq.read_table(SHARED / "data/trec/train.parquet")
    rows = [each.encode()[:LENGTH].ljust(LENGTH) for each in table["text"].to_pylist()]
    labels = table["coarse_label"].to_pylist()
    return torch.tensor([list(row) for row in rows]), torch.tensor(labels)


@cache
def images(split: str, count: int) -> tuple[Tensor, Tensor]:
    """Return images of CIFAR-10 as the published networks take them, and their classes."""
    from studies.dr_frankenstein.networks import normalised

    table = pq.read_table(SHARED / f"data/cifar10/{split}.parquet").slice(0, count)
    names = table.column_names
    pixels = [
        np.array(Image.open(BytesIO(row["bytes"])).convert("RGB"))
        for row in table["img" if "img" in names else "image"].to_pylist()
    ]
    return normalised(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)), torch.tensor(table["label"].to_pylist())


def windows(data: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return pieces of a text."""
    starts = torch.randint(len(data) - LENGTH - 1, (count,), generator=generator).tolist()
    return torch.stack([data[start : start + LENGTH] for start in starts])


def train(
    model: nn.Module, loss: Callable[[torch.Generator], Tensor], only: nn.Module, steps: int, rate: float
) -> None:
    """Train a part of a network; norms keep their running statistics."""
    generator = torch.Generator().manual_seed(1)
    parameters = list(only.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    model.train(only is model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(generator).backward()
        optimizer.step()
        schedule.step()
    model.eval().zero_grad(set_to_none=True)


def trained(name: str, model: nn.Module, work: Callable[[], None]) -> nn.Module:
    """Train a network once, and keep it."""
    path = KEPT / f"{name}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
    else:
        work()
        KEPT.mkdir(exist_ok=True)
        torch.save(model.state_dict(), path)
    return model.eval()


def classifier_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Callable[[torch.Generator], Tensor]:
    """Return the loss of a batch of 64."""

    def loss(generator: torch.Generator) -> Tensor:
        chosen = torch.randint(len(inputs), (64,), generator=generator)
        output = model(inputs[chosen])
        return nn.functional.cross_entropy(output if isinstance(output, Tensor) else output.logits, labels[chosen])

    return loss


def decoder(kind: str) -> Case:
    """A decoder of bytes with six blocks, trained on English and tuned on Spanish."""
    torch.manual_seed(0)
    common = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    model: Any
    if kind == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(n_embd=96, n_layer=6, n_head=4, n_positions=128, **common, **dropout)
        model, stack = transformers.GPT2LMHeadModel(config), "transformer.h"
    else:
        sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
        model, stack = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **common)), "model.layers"

    def loss_on(network: Any, data: Tensor, count: int) -> Callable[[torch.Generator], Tensor]:
        def loss(generator: torch.Generator) -> Tensor:
            ids = windows(data, count, generator)
            return network(input_ids=ids, labels=ids).loss

        return loss

    english, spanish = torch.cat([text("trec"), text("english")]), text("spanish")
    trained(kind, model, lambda: train(model, loss_on(model, english, 24), model, 1500, 2e-3))

    def tune(network: nn.Module, block: str, steps: int) -> None:
        train(network, loss_on(network, spanish[:-40_000], 16), network.get_submodule(block), steps, 5e-4)

    draw = torch.Generator().manual_seed(9)
    held_out = torch.cat([windows(part[-40_000:], SAMPLES // 2, draw) for part in (spanish, text("trec"))])
    return Case(model, held_out, "input_ids", [f"{stack}.{i}" for i in range(6)], tune)


def bert() -> Case:
    """A post-norm encoder of bytes that classifies questions, tuned on wrong labels."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=2 * LENGTH, num_labels=6, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    ids, labels = questions()
    half = len(ids) - 1000
    trained("bert", model, lambda: train(model, classifier_loss(model, ids[:half], labels[:half]), model, 800, 1e-3))

    def tune(network: nn.Module, block: str, steps: int) -> None:
        loss = classifier_loss(network, ids[:half], (labels[:half] + 1) % 6)
        train(network, loss, network.get_submodule(block), steps, 5e-4)

    return Case(model, ids[-SAMPLES:], "input_ids", [f"bert.encoder.layer.{i}" for i in range(4)], tune)


def vision(kind: str) -> Case:
    """A network of images, tuned on images with inverted colours."""
    from studies.dr_frankenstein.networks import read, small_vit

    torch.manual_seed(0)
    pixels, labels = images("train", OTHER)
    if kind == "vit":
        model: nn.Module = small_vit()
        trained("vit", model, lambda: train(model, classifier_loss(model, pixels, labels), model, 1000, 1e-3))
        blocks = [f"blocks.{i}" for i in range(6)]
    else:
        model, _ = read(SHARED / f"models/drfrankenstein_{kind}/in0-gn0.safetensors")
        blocks = [f"conv{i}" for i in range(1, 9)] if kind == "tiny10" else []
        blocks = blocks or [f"layer{stage}.{block}" for stage in (1, 2, 3) for block in range(3)]

    def tune(network: nn.Module, block: str, steps: int) -> None:
        train(network, classifier_loss(network, -pixels, labels), network.get_submodule(block), steps, 5e-4)

    return Case(model, images("test", SAMPLES)[0], "pixel_values", blocks, tune)


CASES: dict[str, Callable[[], Case]] = {
    "Tiny-10": lambda: vision("tiny10"), "ResNet-20": lambda: vision("resnet20"), "ViT": lambda: vision("vit"),
    "BERT": bert, "GPT-2": lambda: decoder("gpt2"), "Llama": lambda: decoder("llama"),
}  # fmt: skip


# -- edits -------------------------------------------------------------------------------------------------------------
def rounded(model: nn.Module, bits: int) -> nn.Module:
    """Round all matrices of a copy of a network, row by row; of few bits not the embeddings and the head."""
    twin = copy.deepcopy(model)
    for name, value in twin.named_parameters():
        outer = any(part in name for part in ("embed", "wte", "wpe", "head", "fc.", "classifier"))
        if value.dim() > 1 and not (bits < 8 and outer):
            _round(value, bits)
    return twin


def _round(value: Tensor, bits: int) -> None:
    rows = value.data.flatten(1)
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    value.data = ((rows / scale).round() * scale).view_as(value)


def matrices(module: nn.Module) -> Iterator[Tensor]:
    """Yield the matrices and kernels of a module."""
    return (value for value in module.parameters() if value.dim() > 1)


def edits(case: Case) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield what is planted: its kind, the block, and the network."""
    places = [case.blocks[i] for i in (1, len(case.blocks) // 2, len(case.blocks) - 2)]
    for steps, chosen in ((60, places), (10, places[1:2])):
        for block in chosen:
            twin = copy.deepcopy(case.model)
            case.tuning(twin, block, steps)
            yield f"tuned, {steps} steps", block, twin
    for kind in ("pruned by half", "rounded to 3 bits", "without a head"):
        twin, block = copy.deepcopy(case.model), places[1]
        module = twin.get_submodule(block)
        if kind == "without a head":
            values = [v for n, v in module.named_parameters() if v.dim() > 1 and ("attn" in n or "attention" in n)]
            values = values or list(matrices(module))
            last = values[-1].data  # the map out of the heads, or a convolution: a quarter of its inputs
            conv1d = type(module).__name__ == "GPT2Block"
            (last if conv1d else last.transpose(0, 1))[: max(1, last.shape[0 if conv1d else 1] // 4)] = 0
        else:
            for value in matrices(module):
                if kind == "pruned by half":
                    value.data[value.abs() < value.abs().flatten().median()] = 0
                else:
                    _round(value, 3)
        yield kind, block, twin


def copies(case: Case) -> Iterator[tuple[str, nn.Module]]:
    """Yield copies in which no block has changed but by rounding or at random."""
    for dtype in (torch.bfloat16, torch.float16):
        twin = copy.deepcopy(case.model)
        for value in twin.parameters():
            value.data = value.data.to(dtype).float()
        yield str(dtype).removeprefix("torch."), twin
    yield "int8", rounded(case.model, 8)
    yield "int4", rounded(case.model, 4)
    for seed, size in enumerate((0.01, 0.03, 0.1)):
        twin, draw = copy.deepcopy(case.model), torch.Generator().manual_seed(seed)
        for block in case.blocks:
            for value in matrices(twin.get_submodule(block)):
                rows = value.data.flatten(1)
                rank = min(4, *rows.shape)
                low = torch.randn(len(rows), rank, generator=draw) @ torch.randn(rank, rows.shape[1], generator=draw)
                value.data += (low * size * rows.norm() / low.norm()).view_as(value)
        yield "random adapter", twin
    twin = copy.deepcopy(case.model)
    head = [module for module in twin.modules() if isinstance(module, nn.Linear)][-1]
    torch.manual_seed(5)
    head.weight = nn.Parameter(torch.randn_like(head.weight) * head.weight.std())
    yield "new head", twin


# -- scoring -----------------------------------------------------------------------------------------------------------
def compared(case: Case, other: nn.Module) -> Difference:
    """Compare a network with another version."""
    a, b = (hf_stitch.load(each, example_inputs={case.name: case.samples[:2]} if case.name == "input_ids"
                           else case.samples[:2]) for each in (case.model, other))  # fmt: skip
    return diff(a, b, case.samples, batch_size=SAMPLES, progress=False)


def first(found: Difference) -> dict[str, str]:
    """Return which part is first by each score."""
    known = [part for part in found.parts if part.effect is not None]
    best = {
        "effect": max(known, key=lambda part: part.effect.patch.value).name,
        "effect over noise": max(known, key=lambda part: _finite(part.effect.ratio.value)).name,
        "change of weights": max(found.parts, key=lambda part: part.weights.change).name,
    }
    moved = [part for part in found.parts if part.move is not None]
    for name, key in (("jump of CKA", "cka"), ("jump of the distance", "error")):
        values = [getattr(part.move, key) for part in moved]
        sign, start = (-1, 1.0) if key == "cka" else (1, 0.0)
        jumps = [sign * (now - before) for before, now in zip([start, *values], values, strict=False)]
        best[name] = moved[int(np.nanargmax(jumps))].name if moved else ""
    return best


def takes() -> dict[str, float]:
    """Return what a comparison of networks with 12 blocks takes, over one pass of the first network."""
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=12, num_attention_heads=4, intermediate_size=1024, vocab_size=256
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).eval()
    a, b = (hf_stitch.load(each, example_inputs={"input_ids": torch.ones(2, LENGTH, dtype=torch.long)})
            for each in (model, rounded(model, 8)))  # fmt: skip
    ids = torch.randint(256, (500, LENGTH))
    found: dict[str, float] = {}
    for count in (100, 500):
        chosen = ids[:count]
        began = time.process_time()
        for batch in chosen.split(64):
            a.forward({"input_ids": batch})
        forward = time.process_time() - began
        began = time.process_time()
        result = diff(a, b, chosen, progress=False)
        found |= {
            f"{count} texts, s of a pass": forward,
            f"{count} texts, passes by time": (time.process_time() - began) / forward,
            f"{count} texts, passes by parts": result.forwards,
            f"{count} texts, peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }  # fmt: skip
    began = time.process_time()
    diff(a, b, progress=False)
    return found | {"weights alone, s": time.process_time() - began}


def _finite(value: float) -> float:
    return value if np.isfinite(value) else 0.0


def main() -> None:
    """Print where planted blocks stand, and what is found in copies."""
    if not (SHARED / "data").is_dir():
        print(f"skipped: no data in {SHARED}")
        return
    torch.set_num_threads(1)
    print({name: round(value, 1) for name, value in takes().items()}, flush=True)
    hits: dict[tuple[str, str, str], list[bool]] = defaultdict(list)
    beside, false, cost = [], defaultdict(list), defaultdict(list)
    for name, make in CASES.items():
        case = make()
        for kind, block, twin in edits(case):
            for top, other in (("alone", twin), ("int8", rounded(twin, 8)), ("int4", rounded(twin, 4))):
                if kind == "rounded to 3 bits" and top == "int4":
                    continue
                began = time.process_time()
                found = compared(case, other)
                cost[name].append((found.forwards, time.process_time() - began))
                for score, part in first(found).items():
                    hits[score, kind, top].append(part == block)
                causes = [part.name for part in found.causes]
                hits["finding", kind, top].append(block in causes)
                beside += [part.name in causes for part in found.parts if part.effect and part.name != block]
                print(f"{name} {kind} {top}: {block}", found.verdict, flush=True)
        for kind, other in copies(case):
            found = compared(case, other)
            heads = [part.name for part in found.parts if not part.block][-1:] if kind == "new head" else []
            tested = [part for part in found.parts if part.effect and part.name not in heads]
            false[kind] += [part.effect.causal for part in tested]
            most = max((part.effect.ratio.value for part in tested), default=0.0)
            print(f"{name} copy {kind}: {[p.name for p in found.causes]}, at most {most:.2f}", flush=True)
    table = Table("score", "kind", *("alone", "int8", "int4"), title="planted block first")
    for score, kind in dict.fromkeys((score, kind) for score, kind, _ in hits):
        table.add_row(score, kind, *(_count(hits.get((score, kind, top), [])) for top in ("alone", "int8", "int4")))
    for score in dict.fromkeys(score for score, _, _ in hits):
        tops = ("alone", "int8", "int4")
        table.add_row(
            score,
            "all",
            *(_count([x for (s, _, t), v in hits.items() if (s, t) == (score, top) for x in v]) for top in tops),
        )
    console = Console(width=120)
    console.print(table)
    console.print("findings in other parts than the planted block:", _count(beside))
    console.print("findings in copies:", {kind: _count(values) for kind, values in false.items()})
    console.print("forwards, CPU s:", {n: tuple(np.mean(v, 0).round(1).tolist()) for n, v in cost.items()})
    console.print(machine())


def _count(values: list[bool]) -> str:
    return f"{sum(values)} of {len(values)}" if values else ""


if __name__ == "__main__":
    main()
