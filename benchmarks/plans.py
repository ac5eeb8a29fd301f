"""Plans without data and weights, compared with the measured cost of the same jobs; and plans of very large pairs.

Small pairs run: one process per pair builds both networks, verifies a cut and does the job. Its seconds are processor
time without the verification, its memory is the peak of anonymous memory minus the memory after the imports, and its
passes are the operations of matrices and convolutions over one forward of both networks for each sample. Plans assume
the speed of a matrix product on this machine, in processor time. Pairs that do not fit on a CPU are planned from
configs alone, for other devices.

``python -m benchmarks plans`` prints both tables.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import timm
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import hf_stitch
from benchmarks.offload import peak_of
from benchmarks.timing import alone, show
from hf_stitch.adapters.loading import described
from hf_stitch.workflows import _plan

BATCH, TOKENS = 4, 128
"""Samples of a batch, and tokens of the texts that run."""
JOBS = ("compare", "stitch")
METRIC: dict[str, Any] = {"metrics": ["linear_cka:debiased=True"]}  # samples are few


class Case(NamedTuple):
    """Two networks of one architecture, and samples for them."""

    named: Any  # a name or config is enough for a plan
    build: Callable[[], nn.Module]
    samples: Callable[[int], Tensor]
    n: int
    layer: str


def _images(n: int) -> Tensor:
    return torch.randn(n, 3, 224, 224, generator=torch.Generator().manual_seed(0))


def _tokens(n: int) -> Tensor:
    return torch.randint(1000, 20000, (n, TOKENS), generator=torch.Generator().manual_seed(0))


GPT2 = hf.GPT2Config(architectures=["GPT2LMHeadModel"])
CASES = {
    "GPT-2": Case(GPT2, lambda: hf.GPT2LMHeadModel(GPT2), _tokens, 10, "transformer.h.6"),
    "ViT-S/16": Case(
        "timm:vit_small_patch16_224", lambda: timm.create_model("vit_small_patch16_224"), _images, 40, "blocks.6"
    ),
    "ResNet-18": Case("timm:resnet18", lambda: timm.create_model("resnet18"), _images, 80, "layer3.0"),
}
SHAPES: dict[str, Any] = {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "dtype": "bfloat16",
}  # fmt: skip
LARGE = (
    hf.LlamaConfig(
        **SHAPES, intermediate_size=28672, vocab_size=128256, max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"],
    ),
    hf.Qwen2Config(
        **SHAPES, intermediate_size=29568, vocab_size=152064, max_position_embeddings=32768,
        architectures=["Qwen2ForCausalLM"],
    ),
)  # fmt: skip
"""The shapes of Llama 3 70B and Qwen2 72B."""
DEVICES = {"80 GB": (80e9, 4e14), "141 GB": (141e9, 4e14), "24 GB": (24e9, 8e13)}
"""Name -> bytes, and operations per second in bfloat16, about 40% of the vendor's peak. Assumed, not measured."""


def rate() -> float:
    """Return the operations of a matrix product of float32 per second of processor time."""
    with patch("hf_stitch.analysis.planning.time.perf_counter", time.process_time):
        return max(_plan.speed(torch.float32) for _ in range(5))


def planned(job: str, networks: Any, n: int, batch: int, tokens: int) -> tuple[Any, float]:
    """Return a plan without data for a number of samples, and its seconds of processor time."""
    start = time.process_time()
    with patch.multiple(_plan, SAMPLES=n, TOKENS=tokens):
        estimate = hf_stitch.plan(getattr(hf_stitch, job), *networks, None, batch_size=batch)
    return estimate, time.process_time() - start


def taken(name: str, job: str) -> dict[str, float]:
    """Plan a job, do it, and return both in this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case, measured = CASES[name], dict[str, float]()

    def work() -> Callable[[], object]:
        models = [case.build().eval() for _ in range(2)]
        samples = case.samples(case.n)
        a, b = (hf_stitch.load(verb, example_inputs=samples[:2]) for verb in models)
        for verb in (a, b):
            verb.verify_cut(case.layer)
        ends = {"source_layer": case.layer, "target_layer": case.layer, "matcher": "ridge"}  # some parts have few rows
        options: dict[str, Any] = ends if job == "stitch" else METRIC
        do = partial(getattr(hf_stitch, job), a, b, samples, batch_size=BATCH, progress=False, **options)
        start = time.process_time()
        do()
        measured["seconds"] = time.process_time() - start
        return do

    plan, _ = planned(job, [described(case.named) for _ in range(2)], case.n, BATCH, TOKENS)
    plan, few = plan.on("this CPU", 1e12, rate()), torch.randn(99, 4)
    tiny = hf_stitch.load(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), example_inputs=few[:2])
    for verb in (hf_stitch.compare, hf_stitch.stitch):  # imports everything that the job needs
        verb(tiny, tiny, few, progress=False)
    do, _, peak = peak_of(work)
    with FlopCounterMode(display=False) as counter:
        do()
    return {
        **measured, "peak": peak, "passes": counter.get_total_flops() / plan.seconds / plan.speed,
        "planned seconds": plan.seconds, "planned memory": sum(plan.memory.values()) / 1e9,
    }  # fmt: skip


def small() -> Iterator[tuple[str, ...]]:
    """Yield plans and measurements of small pairs."""
    for name, case in CASES.items():
        for job in JOBS:
            row = json.loads(alone("plans", name, job))
            figures = [
                row["passes"], row["seconds"], row["planned seconds"], row["planned seconds"] / row["seconds"],
                row["peak"], row["planned memory"], row["planned memory"] / row["peak"],
            ]  # fmt: skip
            yield name, job, str(case.n), *(f"{figure:.2f}" for figure in figures)


def large() -> Iterator[tuple[str, ...]]:
    """Yield plans of a large pair."""
    for job in JOBS:
        estimate, seconds = planned(job, LARGE, 1000, 64, 512)
        for name, (memory, speed) in DEVICES.items():
            plan = estimate.on(name, memory, speed)
            sizes = sum(plan.memory.values()) / 1e9, plan.memory["statistics"] / 1e9
            hours = plan.seconds / 3600, plan.seconds / 3.6
            yield job, name, str(plan.devices), *(f"{figure:.3g}" for figure in (*sizes, *hours, seconds))


def main() -> None:
    """Print the tables."""
    columns = "pair", "job", "samples", "passes", "seconds", "planned", "ratio", "peak GB", "planned", "ratio"
    show("plans without data, and measurements", columns, small())
    columns = "job", "device", "number", "memory GB", "statistics GB", "hours for 1,000", "for 1,000,000", "plan s"
    show("plans of a large pair", columns, large())


if __name__ == "__main__":
    print(json.dumps(taken(*sys.argv[1:])))
