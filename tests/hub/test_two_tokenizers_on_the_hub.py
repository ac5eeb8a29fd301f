"""Decoders with different tokenizers on the Hub: both artefacts, their cards, and what loads them."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import torch
from server import Hub

import hf_stitch
from hf_stitch import StitchedModel, Stitcher

from tiny_networks import stitched  # isort: skip
from two_tokenizers import LAYER, SENTENCES, decoder  # isort: skip


def put(hub: Hub, name: str) -> str:
    adapter = decoder(name, torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        adapter.model.save_pretrained(folder)
        adapter.processor.save_pretrained(folder)
        hub.put(f"alice/{name}", {path.name: path.read_bytes() for path in Path(folder).iterdir()})
    return f"alice/{name}"


def test_both_artefacts_are_pushed_and_pulled(hub: Hub) -> None:
    names = [put(hub, name) for name in ("llama", "gpt2")]
    a, b = map(hf_stitch.load, names)
    model = stitched(a, b, SENTENCES, (LAYER["llama"], LAYER["gpt2"]), align="prefix", own=True)
    model.push_to_hub("alice/whole")
    model.stitcher.push_to_hub("alice/small")
    inputs = model.preprocess(["The walker is walk"])
    with torch.no_grad():
        wanted = model(**inputs).logits
        assert torch.equal(StitchedModel.from_pretrained("alice/whole")(**inputs).logits, wanted)
        attached = Stitcher.from_pretrained("alice/small").attach()  # downloads both networks
        assert torch.equal(attached(**inputs).logits, wanted)
    assert "source_tokenizer.json" in hub.files("alice/whole")
    for name in ("whole", "small"):
        shown = hub.files(f"alice/{name}")["README.md"].decode()
        (code,) = re.findall(r"```python\n(.*?)```", shown, re.DOTALL)
        exec(compile(code, name, "exec"), {})
