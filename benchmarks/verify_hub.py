"""Verify real checkpoints of the Hub: their cuts are exact, and the example of README runs.

``python -m benchmarks.verify_hub`` (``make verify-hub``) loads a dozen networks of different libraries and families,
lists their cuts, and compares the middle one with the network itself on raw samples, bit for bit. It writes what it
verified to ``build/hub.json``, after each network, and a page beside it. A second run goes on with the networks that
are missing, have failed, or were verified at another revision or with other versions.

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
"""Id of a network -> the head to load; ``None`` for the one that its config names."""
TEXTS = [
    "A stitch carries activations over.",
    "Two networks that were trained apart can represent the same things in different coordinates.",
    "Short.",
    "Padding on either side must change nothing.",
]
IMAGES = 60


def images(count: int) -> list[Any]:
    """Return pictures of digits in colour."""
    digits = hf_stitch.data.read_data("sklearn:digits", split="test")
    return [digits[place]["image"].convert("RGB") for place in range(count)]


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
        "parameters": sum(each.numel() for each in network.model.parameters()), "cuts": list(cuts), "checked": middle,
        **_compared(got, expected),
    }  # fmt: skip


@torch.no_grad()
def verify_example() -> dict[str, Any]:
    """Run the first snippet of README on images, and compare the model that it saved and loaded with the one before."""
    (code, *_) = re.findall(r"^```python\n(.*?)^```", (ROOT / README).read_text(encoding="utf-8"), re.M | re.S)
    named: dict[str, Any] = {"images": images(IMAGES)}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, chdir(folder):
        exec(compile(code, README, "exec"), named)
    before, after = (
        exactness.bits(each(**each.preprocess(named["images"]))) for each in (named["stitched"], named["again"])
    )
    return {
        "class": type(named["stitched"]).__name__, "library": "hf_stitch",
        "revision": ", ".join(str(named[side].reference.revision) for side in "ab"),
        "cuts": [named["stitched"].source.cut.layer, named["stitched"].target.cut.layer],
        "checked": "save and load", "scores": named["stitched"].evaluation.for_card(),
        **_compared(after, before),
    }  # fmt: skip


def _compared(got: list[torch.Tensor], expected: list[torch.Tensor]) -> dict[str, Any]:
    """Return whether outputs are equal bit for bit, and their largest difference."""
    differences = [float((x.double() - y.double()).abs().max()) for x, y in zip(got, expected, strict=True)]
    return {"exact": exactness.agree(got, expected), "difference": max(differences)}


def page(record: dict[str, Any]) -> str:
    """Return what was verified as Markdown."""
    found = record["verified"]
    exact = sum(bool(each.get("exact")) for each in found.values())
    lines = [
        "# Checkpoints of the Hub", "",
        f"{exact} of {len(found)} are exact: the network that is run up to a cut and from it returns its own outputs, "
        "bit for bit.", "",
        "| checkpoint | revision | class | cuts | checked | difference |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, each in found.items():
        revision = ", ".join(part[:8] for part in str(each.get("revision", "")).split(", "))
        result = f"{each['difference']:g}" if "difference" in each else f"failed: {each['error']}".replace("|", "\\|")
        cells = (name, revision, each.get("class", ""), len(each.get("cuts", ())), each.get("checked", ""), result)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    used = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return "\n".join([*lines, "", f"With {used} on {record['machine']}.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify all checkpoints, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build") / "hub.json", help="file for what was verified")
    parser.add_argument("names", nargs="*", help=f"ids of networks, or {README} (default: all)")
    given = parser.parse_args(arguments)
    asked = given.names or [README, *CHECKPOINTS]
    kept = json.loads(given.out.read_text(encoding="utf-8"))["verified"] if given.out.is_file() else {}
    record: dict[str, Any] = {"versions": versions(), "machine": machine(), "verified": kept}
    for name in asked:
        if hub.is_out_of_reach(next(iter(CHECKPOINTS)) if name == README else name):
            print(
                f"error: the Hub cannot be reached, so that nothing more is verified. Connect this machine, and run it "
                f"again; what was verified stays in {given.out}.", file=sys.stderr,
            )  # fmt: skip
            return 2
        if name != README and _is_done(kept.get(name), name):
            print(f"{name}: done")
            continue
        start = time.perf_counter()
        try:
            found = verify_example() if name == README else verify(name, CHECKPOINTS.get(name))
        except Exception as error:  # of one network; the others are verified
            found = {"error": " ".join(f"{type(error).__name__}: {error}".split()), "exact": False}
        kept[name] = {**found, "seconds": round(time.perf_counter() - start, 1), "versions": record["versions"]}
        print(f"{name}: {found.get('error') or ('exact' if found['exact'] else 'differs')}", flush=True)
        _write(given.out, json.dumps(record, indent=1) + "\n")
        _write(given.out.with_suffix(".md"), page(record))
    return 0 if all(kept[name]["exact"] for name in asked) else 1


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, lambda place: place.write_text(text, encoding="utf-8"))


def _is_done(found: dict[str, Any] | None, name: str) -> bool:
    """Return whether the present revision of a network was verified with the present versions."""
    if not found or not found["exact"] or found["versions"] != versions():
        return False
    return HfApi().model_info(name).sha == found["revision"]


if __name__ == "__main__":
    sys.exit(main())
