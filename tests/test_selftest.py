"""The self-test of an installation: it passes here, leaves nothing behind, and its parts fail when they should."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicLayer

import hf_stitch
from hf_stitch import StitchedModelForCausalLM, selftest
from hf_stitch.matchers.regression import Lstsq, Ridge
from hf_stitch.resources import one_thread
from hf_stitch.selftest import PARTS, self_test
from hf_stitch.stitches import StitchingLayer


def test_the_number_of_threads_is_restored_also_after_an_error() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(KeyError), one_thread():
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_error_of_a_library_is_reported_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise KeyError("cache")

    monkeypatch.setattr(selftest, "PARTS", {"compare": broken, "generate": lambda: None})
    seen: list[tuple[str, str]] = []
    found = self_test(lambda *given: seen.append(given))
    assert found == dict(seen) == {"compare": "KeyError: 'cache'", "generate": ""}


@pytest.fixture
def afresh() -> Iterator[None]:
    """Networks that no other test has changed, and that no other test gets."""
    built = (selftest._vit, selftest._decoder, selftest._stitched)
    for each in built:
        each.cache_clear()
    yield
    for each in built:
        each.cache_clear()


@pytest.mark.usefixtures("afresh")
def test_it_needs_no_connection_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the self-test connects to another machine")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    assert self_test() == dict.fromkeys(PARTS, "")
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def no_identity(patch: pytest.MonkeyPatch) -> None:
    forward = StitchingLayer.forward
    patch.setattr(StitchingLayer, "forward", lambda *given, **named: forward(*given, **named) * (1 + 1e-6))


def other_map(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lstsq, "fit", lambda self, *given, **options: Ridge(ridge=5.0).fit(*given, **options))


def no_cache(patch: pytest.MonkeyPatch) -> None:
    generate = StitchedModelForCausalLM.generate
    uncached = lambda self, **options: generate(self, **{**options, "use_cache": False})  # noqa: E731
    patch.setattr(StitchedModelForCausalLM, "generate", uncached)


def no_mask(patch: pytest.MonkeyPatch) -> None:
    generate = StitchedModelForCausalLM.generate

    def unmasked(self: Any, **options: Any) -> Any:
        return generate(self, **{**options, "attention_mask": torch.ones_like(options["input_ids"])})

    patch.setattr(StitchedModelForCausalLM, "generate", unmasked)


def forgetful_cache(patch: pytest.MonkeyPatch) -> None:
    """Of the past, it returns zeros."""
    update = DynamicLayer.update

    def forget(self: Any, keys: Any, *rest: Any, **options: Any) -> Any:
        found = update(self, keys, *rest, **options)
        past = found[0].shape[2] - keys.shape[2]
        return tuple(torch.cat([torch.zeros_like(each[:, :, :past]), each[:, :, past:]], 2) for each in found)

    patch.setattr(DynamicLayer, "update", forget)


def other_weights(patch: pytest.MonkeyPatch) -> None:
    load = StitchedModelForCausalLM.from_pretrained

    def changed(*given: Any, **options: Any) -> Any:
        model = load(*given, **options)
        with torch.no_grad():
            next(model.stitch.parameters()).mul_(1 + 1e-3)
        return model

    patch.setattr(StitchedModelForCausalLM, "from_pretrained", changed)


def other_cka(patch: pytest.MonkeyPatch) -> None:
    compare = hf_stitch.compare

    def wrong(*given: Any, **options: Any) -> Any:
        atlas = compare(*given, **options)
        atlas.values["linear_cka"][1, 1] = 0.999
        return atlas

    patch.setattr(hf_stitch, "compare", wrong)


CUT, STITCHED = ("cut a vision transformer", "cut a decoder"), ("stitch a decoder to itself",)
COMPARE, CACHE, SAVED = "compare a network with itself", "generate with a cache", "save and load"


@pytest.mark.usefixtures("afresh")
@pytest.mark.filterwarnings("ignore:each token requires a run over the whole text")
@pytest.mark.parametrize(
    "changes",
    [
        {
            no_identity: (CUT, "the identity stitch at"),
            other_cka: ((COMPARE,), "CKA of blocks.1 with itself must be 1, got 0.999"),
            no_cache: ((CACHE,), "the model does not use a cache: it is missing"),
            other_weights: ((SAVED,), "the outputs of the loaded model differ"),
        },
        {other_map: (STITCHED, "stitched to itself differ by"), no_mask: ((CACHE,), "continues in a padded batch by")},
        {forgetful_cache: ((CACHE,), "cache")},
    ],
)
def test_a_part_fails_by_the_change_that_it_is_for(
    changes: dict[Any, tuple[tuple[str, ...], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for change in changes:
        change(monkeypatch)
    found = self_test()
    expected = {part: message for parts, message in changes.values() for part in parts}
    assert {name for name, error in found.items() if error} == {*expected}, found
    assert all(message in found[part] for part, message in expected.items()), found
