"""The settings by which processors are recognised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from hf_stitch.adapters.libraries.timm_images import TimmImageProcessor
from hf_stitch.adapters.pinning import settings_of_config, settings_of_processor

VOCABULARY = {
    token: index for index, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##c"])
}
BYTES = {"<|endoftext|>": 0, "a": 1, "b": 2, "c": 3, "ab": 4, "bc": 5}


def phobert(folder: Path, *merges: str) -> Any:
    """A slow tokenizer with merges."""
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("a@@ 3\nb 2\nab 1\n")
    (folder / "bpe.codes").write_text("".join(f"{merge} 1\n" for merge in merges))
    return transformers.PhobertTokenizer(str(folder / "vocab.txt"), str(folder / "bpe.codes"))


def bert(**options: Any) -> Any:
    return transformers.BertTokenizer(vocab=VOCABULARY, **options)


def gpt2(*merges: tuple[str, str], **options: Any) -> Any:
    return transformers.GPT2Tokenizer(vocab=BYTES, merges=list(merges), **options)


def changes(before: Any, after: Any) -> list[str]:
    pins = [settings_of_processor(processor) for processor in (before, after)]
    assert pins[0] is not None and pins[1] is not None
    return pins[0].changes(pins[1])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (bert(), bert(do_lower_case=False), "normalizer.lowercase True, now False"),
        (bert(), bert(strip_accents=True), "normalizer.strip_accents None, now True"),
        (bert(), bert(model_max_length=9), "model_max_length 1000000000000000019884624838656, now 9"),
        (gpt2(("a", "b")), gpt2(("b", "c")), "model.merges [['a', 'b']], now [['b', 'c']]"),
        (gpt2(), gpt2(add_prefix_space=True), "pre_tokenizer.add_prefix_space False, now True"),
        (gpt2(pad_token="a"), gpt2(pad_token="b"), "pad_token 'a', now 'b'"),
        (transformers.ByT5Tokenizer(), transformers.CanineTokenizer(), "class 'ByT5Tokenizer', now 'CanineTokenizer'"),
        (TimmImageProcessor(), TimmImageProcessor(crop_pct=1.0), "crop_pct 0.875, now 1.0"),
        (
            transformers.ViTImageProcessor(), transformers.ViTImageProcessor(size={"height": 9, "width": 224}),
            "size.height 224, now 9",
        ),
        (
            transformers.CLIPImageProcessor(), transformers.CLIPImageProcessor(do_center_crop=False),
            "do_center_crop True, now False",
        ),
    ],
)  # fmt: skip
def test_what_changes_the_outputs_of_a_processor_is_named(before: Any, after: Any, message: str) -> None:
    assert message in changes(before, after)
    assert changes(before, before) == []


def test_the_merges_of_a_slow_tokenizer_count(tmp_path: Path) -> None:
    one, other = phobert(tmp_path / "one", "a@@ b"), phobert(tmp_path / "other", "b a")
    assert [change.split()[0] for change in changes(one, other)] == ["merges"]
    assert changes(one, phobert(tmp_path / "elsewhere", "a@@ b")) == []
    assert str(tmp_path) not in repr(settings_of_processor(one))


@pytest.mark.parametrize(
    "make",
    [bert, lambda: gpt2(("a", "b")), transformers.ByT5Tokenizer, transformers.ViTImageProcessor,
     transformers.CLIPImageProcessor, lambda: TimmImageProcessor((3, 32, 32)),
     lambda: transformers.ViTImageProcessor(image_mean=[0.1] * 3)],
    ids=["bert", "gpt2", "byt5", "vit", "clip", "timm", "other mean"],
)  # fmt: skip
def test_a_saved_and_loaded_processor_is_the_same(make: Any, tmp_path: Path) -> None:
    live = make()
    live.save_pretrained(tmp_path)
    loaded = type(live).from_pretrained(tmp_path)
    assert changes(live, loaded) == [] == changes(loaded, live)
    assert str(tmp_path) not in json.dumps(settings_of_processor(loaded).chosen)


def test_the_options_of_a_slow_tokenizer_count(tmp_path: Path) -> None:
    (tmp_path / "prophetnet.tokenizer").write_text("\n".join(["[PAD]", "[UNK]", "[SEP]", "[MASK]", "a"]))
    place = str(tmp_path / "prophetnet.tokenizer")
    one, other = (transformers.ProphetNetTokenizer(place, do_lower_case=lower) for lower in (True, False))
    assert changes(one, other) == ["options.do_lower_case True, now False"]
    assert changes(one, transformers.ProphetNetTokenizer(place)) == []


def test_a_padding_token_matters_only_if_both_have_one() -> None:
    assert changes(gpt2(), gpt2(pad_token="<|endoftext|>")) == []


def test_user_code_and_no_processor_have_no_settings() -> None:
    assert settings_of_processor(len) is None
    assert settings_of_processor(None) is None


def test_a_config_is_its_class_defaults_and_what_was_chosen() -> None:
    found = settings_of_config(transformers.ViTConfig(hidden_size=8, extra={"a": (1, 2)}, architectures=["ViTModel"]))
    assert found.chosen["hidden_size"] == 8 and found.chosen["extra.a"] == [1, 2]
    assert found.defaults["hidden_act"] == "gelu" and "layer_norm_eps" not in found.chosen
    assert not {"architectures", "transformers_version", "dtype", "id2label", "hidden_dropout_prob"} & {
        *found.chosen,
        *found.defaults,
    }


def test_a_dropout_that_acts_in_eval_mode_is_kept() -> None:
    one, other = (settings_of_config(transformers.EsmConfig(token_dropout=on)) for on in (True, False))
    assert one.changes(other) == ["token_dropout True, now False"]
