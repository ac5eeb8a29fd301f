"""Verify real checkpoints of the Hub: their cuts are exact, and the example of README runs.

``python -m benchmarks.verify_hub`` (``make verify-hub``) loads a dozen networks of different libraries and families,
lists their cuts, and compares the middle cut with the plain network on raw samples, bit for bit. After each network, it
writes its results to ``build/hub.json``, with a page next to it. A second run continues with the networks that are
missing, have failed, or were verified at another revision or with other versions.

The process exits with 1 if anything differs or fails, and with 2 if the Hub cannot be reached.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi

import hf_stitch
from benchmarks import exactness
from hf_stitch import hub
from hf_stitch.provenance import machine, versions
from hf_stitch.storage.files import write_whole

ROOT = Path(__file__).parents[1]
README = "README.md"
CHECKPOINTS: dict[str, str | None] = {
    "timm/resnet18.a1_in1k": None,
    "timm/rexnet_100.nav_in1k": None,
    "timm/vit_base_patch32_clip_224.openai": None,
    "microsoft/resnet-18": None,
    "google/vit-base-patch16-224": None,
    "facebook/dinov2-small": None,
    "google-bert/bert-base-uncased": None,
    "FacebookAI/roberta-base": None,
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": None,
    "sentence-transformers/all-MiniLM-L6-v2": None,
    "google-t5/t5-small": "text-encoding",
    "openai-community/gpt2": None,
    "HuggingFaceTB/SmolLM2-135M": None,
    "Qwen/Qwen2.5-0.5B": None,
}
"""Id of a network -> the head to load; ``None`` for the head in its config."""
TEXTS = [
    "A stitch maps activations.",
    "Two independently trained networks can represent the same things in different coordinates.",
    "Short.",
    "Padding on either side must change nothing.",
]
IMAGES = 60


def images(count: int) -> list[Any]:
    """Return images of digits in RGB."""
    digits = hf_stitch.data.read_data("sklearn:digits", split="test")
    return [digits[index]["image"].convert("RGB") for index in range(count)]


@torch.no_grad()
def verify(name: str, task: str | None) -> dict[str, Any]:
    """Load a network, list its cuts, and check the middle one."""
    network = hf_stitch.load(name, task=task)
    cuts = network.layers
    middle = cuts[len(cuts) // 2]
    exactness.check(network, (middle,))
    if getattr(network.processor, "pad_token", "") is None:  # as of GPT-2
        network.processor.pad_token = network.processor.eos_token
    inputs = network.preprocess(TEXTS if network.interface.modality == "text" else images(len(TEXTS)))
    expected = exactness.bits(network.model(**{**network.interface.options, **inputs}))
    got = exactness.bits(network.decode(network.encode(inputs, middle)[middle], middle))
    return {
        "class": type(network.model).__name__, "library": network.library, "revision": network.reference.revision,
        "parameters": sum(weight.numel() for weight in network.model.parameters()), "cuts": list(cuts),
        "checked": middle, **_compared(got, expected),
    }  # fmt: skip


@torch.no_grad()
def verify_example() -> dict[str, Any]:
    """Run the first snippet of README on images, and compare its model before saving and after loading."""
    (code, *_) = re.findall(r"^```python\n(.*?)^```", (ROOT / README).read_text(encoding="utf-8"), re.M | re.S)
    namespace: dict[str, Any] = {"images": images(IMAGES)}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, chdir(folder):
        exec(compile(code, README, "exec"), namespace)
    before, after = (
        exactness.bits(model(**model.preprocess(namespace["images"])))
        for model in (namespace["stitched"], namespace["again"])
    )
    return {
        "class": type(namespace["stitched"]).__name__, "library": "hf_stitch",
        "revision": ", ".join(str(namespace[side].reference.revision) for side in "ab"),
        "cuts": [namespace["stitched"].source.cut.layer, namespace["stitched"].target.cut.layer],
        "checked": "save and load", "scores": namespace["stitched"].evaluation.for_card(),
        **_compared(after, before),
    }  # fmt: skip


def _compared(got: list[torch.Tensor], expected: list[torch.Tensor]) -> dict[str, Any]:
    """Return whether outputs are equal bit for bit, and their largest difference."""
    differences = [float((x.double() - y.double()).abs().max()) for x, y in zip(got, expected, strict=True)]
    return {"exact": exactness.agree(got, expected), "difference": max(differences)}


def page(record: dict[str, Any]) -> str:
    """Return the verification results as Markdown."""
    results = record["verified"]
    exact = sum(bool(result_row.get("exact")) for result_row in results.values())
    lines = [
        "# Checkpoints of the Hub", "",
        f"{exact} of {len(results)} are exact: running the network up to a cut and on from it returns its own outputs, "
        "bit for bit.", "",
        "| checkpoint | revision | class | cuts | checked | difference |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, result_row in results.items():
        revision = ", ".join(part[:8] for part in str(result_row.get("revision", "")).split(", "))
        result = (
            f"{result_row['difference']:g}"
            if "difference" in result_row
            else f"failed: {result_row['error']}".replace("|", "\\|")
        )
        cells = (
            name,
            revision,
            result_row.get("class", ""),
            len(result_row.get("cuts", ())),
            result_row.get("checked", ""),
            result,
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    used = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return "\n".join([*lines, "", f"With {used} on {record['machine']}.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify all checkpoints, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build") / "hub.json", help="file for the results")
    parser.add_argument("names", nargs="*", help=f"ids of networks, or {README} (default: all)")
    options = parser.parse_args(arguments)
    names = options.names or [README, *CHECKPOINTS]
    results = json.loads(options.out.read_text(encoding="utf-8"))["verified"] if options.out.is_file() else {}
    record: dict[str, Any] = {"versions": versions(), "machine": machine(), "verified": results}
    for name in names:
        if hub.is_out_of_reach(next(iter(CHECKPOINTS)) if name == README else name):
            print(
                f"error: the Hub cannot be reached. Connect this machine and run again; results so far are in "
                f"{options.out}.", file=sys.stderr,
            )  # fmt: skip
            return 2
        if name != README and _is_done(results.get(name), name):
            print(f"{name}: done")
            continue
        start = time.perf_counter()
        try:
            outcome = verify_example() if name == README else verify(name, CHECKPOINTS.get(name))
        except Exception as error:  # of one network; continue with the rest
            outcome = {"error": " ".join(f"{type(error).__name__}: {error}".split()), "exact": False}
        results[name] = {**outcome, "seconds": round(time.perf_counter() - start, 1), "versions": record["versions"]}
        print(f"{name}: {outcome.get('error') or ('exact' if outcome['exact'] else 'differs')}", flush=True)
        _write(options.out, json.dumps(record, indent=1) + "\n")
        _write(options.out.with_suffix(".md"), page(record))
    return 0 if all(results[name]["exact"] for name in names) else 1


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _is_done(row: dict[str, Any] | None, name: str) -> bool:
    """Return whether the current revision of a network was verified with the current versions."""
    if not row or not row["exact"] or row["versions"] != versions():
        return False
    return HfApi().model_info(name).sha == row["revision"]


if __name__ == "__main__":
    sys.exit(main())
