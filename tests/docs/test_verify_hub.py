"""``make verify-hub`` on a local Hub: what is verified is written at once, and without a connection nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from scenes import files_of, on_the_hub, text_network

from benchmarks import verify_hub

from server import Hub, turned_to_a_hub  # isort: skip

NETWORKS, GPT2 = ("timm/resnet18.a1_in1k", "google/vit-base-patch16-224"), "openai-community/gpt2"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with turned_to_a_hub(tmp_path / "cache") as server:
        for name in NETWORKS:
            server.put(name, on_the_hub()[name])
        gpt2 = text_network("gpt2")
        gpt2.processor.pad_token, gpt2.processor.eos_token = None, "[UNK]"  # as published: no padding
        server.put(GPT2, files_of(gpt2.model.save_pretrained, gpt2.processor.save_pretrained))
        yield server


def test_networks_and_the_example_are_verified_and_kept(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "hub.json"
    given = ["--out", str(out), "README.md", *NETWORKS, GPT2]
    assert verify_hub.main([*given, "alice/absent"]) == 1
    record = json.loads(out.read_text())
    for name, cuts in zip(given[2:], (2, 8, 8, 7), strict=True):
        found = record["verified"][name]
        assert found["exact"] and found["difference"] == 0 and len(found["cuts"]) == cuts and found["checked"], name
        assert set(found["revision"].split(", ")) <= {each.refs["main"] for each in hub.models.values()}
    assert "does not exist on the Hub" in record["verified"]["alice/absent"]["error"]
    assert "transformers" in record["versions"] and record["machine"]
    page = out.with_suffix(".md").read_text()
    assert page.count("\n| ") == 6 and "4 of 5 are exact" in page and "failed: " in page
    capsys.readouterr()
    assert verify_hub.main(given) == 0 and capsys.readouterr().out.count(": done") == 3
    monkeypatch.setattr(verify_hub.exactness, "agree", lambda *_: False)
    hub.put(NETWORKS[0], {**hub.files(NETWORKS[0]), "README.md": b"another revision"})
    assert verify_hub.main(given[:2] + list(NETWORKS)) == 1
    assert not json.loads(out.read_text())["verified"][NETWORKS[0]]["exact"]

    before = out.read_bytes()
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert verify_hub.main(given) == 2
    assert "the Hub cannot be reached" in capsys.readouterr().err and out.read_bytes() == before
