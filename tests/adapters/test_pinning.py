"""The settings by which processors are recognised."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from hf_stitch.adapters.libraries.timm_images import TimmImageProcessor
from hf_stitch.adapters.pinning import OF_TOKENIZERS, settings_of_config, settings_of_processor

VOCABULARY = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##c"])}
BYTES = {"<|endoftext|>": 0, "a": 1, "b": 2, "c": 3, "ab": 4, "bc": 5}


def phobert(folder: Path, *merges: str) -> Any:
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
        (bert(), transformers.ByT5Tokenizer(), "class 'fast tokenizer', now 'ByT5Tokenizer'"),
        (bert(), len, "class 'fast tokenizer', now 'user code'"),
        (TimmImageProcessor(), len, "class 'TimmImageProcessor', now 'user code'"),
        (gpt2(("a", "b")), gpt2(("b", "c")), "model.merges [['a', 'b']], now [['b', 'c']]"),
        (gpt2(), gpt2(add_prefix_space=True), "pre_tokenizer.add_prefix_space False, now True"),
        (gpt2(pad_token="a"), gpt2(pad_token="b"), "pad_token 'a', now 'b'"),
        (TimmImageProcessor(), TimmImageProcessor(crop_pct=1.0), "crop_pct 0.875, now 1.0"),
        (
            transformers.ViTImageProcessor(), transformers.ViTImageProcessor(size={"height": 9, "width": 224}),
            "size.height 224, now 9",
        ),
    ],
)  # fmt: skip
def test_what_changes_the_outputs_of_a_processor_is_named(before: Any, after: Any, message: str) -> None:
    assert message in changes(before, after)
    assert changes(before, before) == []


def test_the_merges_and_options_of_a_slow_tokenizer_count(tmp_path: Path) -> None:
    one, other = phobert(tmp_path / "one", "a@@ b"), phobert(tmp_path / "other", "b a")
    assert [change.split()[0] for change in changes(one, other)] == ["merges"]
    assert changes(one, phobert(tmp_path / "elsewhere", "a@@ b")) == []
    assert str(tmp_path) not in repr(settings_of_processor(one))
    place = tmp_path / "prophetnet.tokenizer"
    place.write_text("\n".join(["[PAD]", "[UNK]", "[SEP]", "[MASK]", "a"]))
    lower, other = (transformers.ProphetNetTokenizer(str(place), do_lower_case=lower) for lower in (True, False))
    assert changes(lower, other) == ["options.do_lower_case True, now False"]
    assert changes(lower, transformers.ProphetNetTokenizer(str(place))) == []


@pytest.mark.parametrize(
    "make",
    [lambda: gpt2(("a", "b")), transformers.ByT5Tokenizer, lambda: TimmImageProcessor((3, 32, 32)),
     lambda: transformers.ViTImageProcessor(image_mean=[0.1] * 3)],
    ids=["fast", "slow", "timm", "images"],
)  # fmt: skip
def test_a_saved_and_loaded_processor_is_the_same(make: Any, tmp_path: Path) -> None:
    live = make()
    live.save_pretrained(tmp_path)
    loaded = type(live).from_pretrained(tmp_path)
    assert changes(live, loaded) == [] == changes(loaded, live)
    assert str(tmp_path) not in json.dumps(settings_of_processor(loaded).chosen)


def test_what_two_processors_do_not_share_is_not_compared() -> None:
    assert changes(gpt2(), gpt2(pad_token="<|endoftext|>")) == []  # a padding token of one alone
    assert changes(len, repr) == []  # user code
    assert settings_of_processor(None) is None


def serialised(change: Any) -> Any:
    """A fast tokenizer whose serialisation is changed by a function, as another version of tokenizers may write it."""
    tokenizer = gpt2(("a", "b"))
    record = json.loads(tokenizer.backend_tokenizer.to_str())
    record["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Replace", "content": "b"}]}
    change(record)
    return SimpleNamespace(
        is_fast=True, get_vocab=tokenizer.get_vocab, pad_token=None,
        **{name: getattr(tokenizer, name) for name in OF_TOKENIZERS},
        backend_tokenizer=SimpleNamespace(to_str=lambda: json.dumps(record)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("padding_side", "left"), ("truncation_side", "left"), ("split_special_tokens", True),
        ("model_input_names", ["input_ids"]),
    ],
)  # fmt: skip
def test_an_attribute_that_changes_what_a_tokenizer_returns_counts(name: str, value: Any) -> None:
    changed = bert()
    setattr(changed, name, value)
    assert any(name in change for change in changes(bert(), changed))


@pytest.mark.parametrize("name", OF_TOKENIZERS)
def test_an_option_that_tokenizers_no_longer_have_is_not_left_out(name: str) -> None:
    renamed = serialised(lambda record: None)
    delattr(renamed, name)
    with pytest.raises(AttributeError, match=name):
        settings_of_processor(renamed)


@pytest.mark.parametrize(
    "add",
    [
        lambda r: r.update(postscript=None), lambda r: r.update(limits={"most": 1}),
        lambda r: r["model"].update(cache=8),
        lambda r: r["normalizer"]["normalizers"][1].update(whole=False), lambda r: r["pre_tokenizer"].update(fast=True),
        lambda r: [token.update(colour="red") for token in r["added_tokens"]],
    ],
)  # fmt: skip
def test_keys_that_only_another_version_of_tokenizers_writes_are_not_compared(add: Any) -> None:
    here, newer = serialised(lambda record: None), serialised(add)
    assert settings_of_processor(here) != settings_of_processor(newer)
    assert changes(here, newer) == [] == changes(newer, here)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda r: r.update(normalizer=None), "normalizer.normalizers.0.type"),
        (lambda r: r["normalizer"]["normalizers"].pop(), "normalizer.normalizers.1.type"),
        (lambda r: r["normalizer"]["normalizers"].reverse(), "normalizer.normalizers.0.type"),
        (lambda r: r["normalizer"]["normalizers"][1].update(content="c"), "normalizer.normalizers.1.content"),
        (lambda r: r.update(post_processor=None), "post_processor.type"),
        (lambda r: r.update(added_tokens=[]), "added_tokens.content"),
        (lambda r: r["added_tokens"][0].update(lstrip=True), "added_tokens.lstrip"),
        (lambda r: r["model"]["vocab"].update(a=2, b=1), "model.vocab"),
    ],
)
def test_parts_of_a_fast_tokenizer_that_are_there_on_one_side_only_count(change: Any, name: str) -> None:
    here, other = serialised(lambda record: None), serialised(change)
    assert name in [text.split()[0] for text in changes(here, other)]
    assert name in [text.split()[0] for text in changes(other, here)]


def test_a_config_is_its_class_defaults_and_what_was_chosen() -> None:
    found = settings_of_config(transformers.ViTConfig(hidden_size=8, extra={"a": (1, 2)}, architectures=["ViTModel"]))
    assert found.chosen["hidden_size"] == 8 and found.chosen["extra.a"] == [1, 2]
    assert found.defaults["hidden_act"] == "gelu" and "layer_norm_eps" not in found.chosen
    left_out = {"architectures", "transformers_version", "dtype", "id2label", "hidden_dropout_prob"}
    assert not left_out & (found.chosen.keys() | found.defaults.keys())
    # but a dropout that acts in eval mode
    one, other = (settings_of_config(transformers.EsmConfig(token_dropout=on)) for on in (True, False))
    assert one.changes(other) == ["token_dropout True, now False"]


class NewerConfig(transformers.ViTConfig):
    def __init__(self, head_width: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.head_width = head_width or self.hidden_size // self.num_attention_heads


def test_a_value_that_only_another_version_derives_is_not_compared() -> None:
    small: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 4, "image_size": 8}
    before, now = (settings_of_config(kind(**small)) for kind in (transformers.ViTConfig, NewerConfig))
    assert now.defaults["head_width"] == 6 and "head_width" not in before.defaults
    assert before.changes(now) == [] == now.changes(before)
    assert before.changes(settings_of_config(NewerConfig(**small, head_width=5))) == ["head_width not set, now 5"]


@pytest.mark.parametrize(
    ("config", "derived"),
    [
        (transformers.LlamaConfig(hidden_size=32, num_attention_heads=4), {"head_dim", "rope_parameters.rope_theta"}),
        (transformers.ResNetConfig(depths=[1, 2], hidden_sizes=[8, 16]), {"stage_names", "out_indices"}),
        (transformers.Gemma3TextConfig(num_hidden_layers=3), {"layer_types"}),
    ],
)
def test_what_configs_derive_is_a_default(config: Any, derived: set[str]) -> None:
    assert derived <= settings_of_config(config).defaults.keys()
