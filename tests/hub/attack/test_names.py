"""The names in a config fetch and start nothing, and nor do constructors of networks."""

from __future__ import annotations

import copy
import logging
import re
import subprocess
import threading
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_stitch.adapters.untrusted import SealedError, sealed, weightless
from hf_stitch.artefacts.record import check_counts
from hf_stitch.registry import registries

from mutations import NAMED, of_transformers  # isort: skip


def build(blueprint: dict[str, Any]) -> torch.nn.Module:
    check_counts(blueprint, "the blueprint")
    with weightless():
        network: torch.nn.Module = registries.adapters.get(blueprint["library"])().build(blueprint)
    return network


# -- names -------------------------------------------------------------------------------------------------------------
BERT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 8}


@pytest.mark.parametrize("what", NAMED)
def test_a_config_names_nothing_to_fetch_or_run(what: str, contact: list[str]) -> None:
    message = "may refer only to installed components|must contain only an architecture of timm"
    message += "|is not in transformers|lacks 'flash_attention_2' in transformers"
    with pytest.raises(ValueError, match=message):
        build(NAMED[what])


def test_remote_code_that_a_config_names_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composite models build their parts with Auto classes, which would prompt the user for 15 seconds."""
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("a prompt"))
    code = {"auto_map": {"AutoModel": "org/name--code.Model", "AutoConfig": "org/name--code.Config"}}
    part = {**BERT, "model_type": "bert", **code}
    config = {"encoder": part, "decoder": {**part, "is_decoder": True, "add_cross_attention": True}, **code}
    assert type(build(of_transformers("EncoderDecoderModel", **config)).encoder).__name__ == "BertModel"


@pytest.mark.parametrize("attention", [None, "eager", "sdpa", "flex_attention"])
def test_harmless_names_are_kept(attention: str | None, contact: list[str]) -> None:
    network = build(of_transformers("BertModel", **BERT) | {"attention": attention})
    assert network.config._attn_implementation == (attention or "sdpa")


def test_only_sealed_code_is_sealed() -> None:
    """Neither other threads nor later code; what is sealed stays so after a nested seal."""
    results = []
    with sealed():
        thread = threading.Thread(target=lambda: results.append(subprocess.run(["true"], check=False).returncode))
        thread.start()
        thread.join()
        with sealed():
            pass
        with pytest.raises(SealedError, match="may not cause the event"):
            subprocess.run(["true"], check=False)
    assert results == [0] and subprocess.run(["true"], check=False).returncode == 0


def test_no_type_of_transformers_has_more_layers_or_classes() -> None:
    found = 0
    for name in CONFIG_MAPPING_NAMES.values():
        try:
            config = getattr(transformers, name)().to_dict()
        except Exception:  # no default config, or a package is missing
            continue
        check_counts(config, name)
        found += 1
    assert found > 300


# -- all types of transformers -----------------------------------------------------------------------------------------
def classes() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in sorted(vars(modeling_auto), key=lambda name: name != "MODEL_MAPPING_NAMES"):
        if re.fullmatch("MODEL_.*MAPPING_NAMES", name):
            for model_type, kinds in vars(modeling_auto)[name].items():
                found.setdefault(model_type, kinds if isinstance(kinds, str) else kinds[0])
    return found


@pytest.mark.parametrize("model_type", sorted(classes())[::8])
def test_no_network_opens_a_connection(model_type: str, contact: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kind = getattr(transformers, classes()[model_type], None)
    try:
        config = copy.deepcopy(kind.config_class().to_dict())
        with sealed(), torch.device("meta"):
            kind(kind.config_class())
    except Exception as error:  # no default config, or a package is missing
        pytest.skip(f"no network from a default config: {type(error).__name__}: {error}")
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [])  # some classes are deprecated
    assert isinstance(build(of_transformers(kind.__name__, **config)), kind)
