"""What newcomers do with folders of networks, data and results, and mostly on the command line."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models
from transformers.utils import logging
from typer.testing import CliRunner

import hf_stitch
from hf_stitch import Samples
from hf_stitch.adapters.pinning import settings_of_config, settings_of_processor
from hf_stitch.cli import app
from hf_stitch.data import read_data
from hf_stitch.data.classes import numbered_as
from hf_stitch.training import TaskLoss


def test_no_word_of_a_vocabulary_is_taken_for_a_setting(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "[PAD]": 1, **{f"w{i}": i for i in range(2, 1100)}, "type": 1100, "player": 1101}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    settings = settings_of_processor(words)
    assert settings is not None
    assert not [key for key in (*settings.chosen, *settings.defaults) if key.endswith(("vocab.type", "vocab.player"))]
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 8}
    net = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=1102, **sizes)).eval()
    a, layer = hf_stitch.load(net, processor=words), "bert.encoder.layer.0"
    texts = Samples.of([f"w{i}" for i in range(2, 42)], label=[0, 1] * 20)
    made = hf_stitch.stitch(a, a, texts, source_layer=layer, target_layer=layer, matcher="identity", progress=False)
    made.save_pretrained(tmp_path)
    ids = torch.tensor([[1100, 1101]])
    assert torch.equal(hf_stitch.StitchedModel.from_pretrained(tmp_path)(input_ids=ids).logits, net(ids).logits)


# -- classes of the data and of the network ----------------------------------------------------------------------------


class Brightness(torch.nn.Module):
    """Names the darkest, the middle and the brightest third of grey values: 0, 1 and 2."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.config: Any = transformers.PretrainedConfig(id2label=names)
        weighted = torch.nn.Linear(12, 1)
        self.body = torch.nn.Sequential(torch.nn.Flatten(), weighted, torch.nn.ReLU())
        self.head = torch.nn.Linear(1, 3)
        with torch.no_grad():
            torch.nn.init.constant_(weighted.weight, 1 / 12)
            torch.nn.init.zeros_(weighted.bias)
            self.head.weight.copy_(torch.tensor([[0.0], [3.0], [6.0]]))
            self.head.bias.copy_(torch.tensor([0.0, -1.0, -3.0]))

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x))


def grey(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1) / 255


@pytest.fixture
def shades(tmp_path: Path) -> Path:
    """A folder of images, one folder per class; the alphabet orders the classes differently than the network."""
    for name, low in (("dark_grey", 0), ("Medium", 95), ("bright", 185)):
        (tmp_path / "shades" / name).mkdir(parents=True)
        for place in range(20):
            Image.new("RGB", (2, 2), (low + place,) * 3).save(tmp_path / "shades" / name / f"{place}.png")
    return tmp_path / "shades"


NAMES = {0: "Dark grey", 1: "medium", 2: "BRIGHT"}


def named(names: dict[int, str]) -> hf_stitch.Adapter:
    """A network whose config names its classes."""
    return hf_stitch.load(Brightness(names).eval(), example_inputs=torch.rand(2, 3, 2, 2), processor=grey)


@pytest.mark.parametrize("matcher", ["identity", TaskLoss(epochs=1, labels="hard", initial="identity", lr=1e-6)])
def test_labels_of_a_folder_of_images_are_matched_by_name(matcher: str | TaskLoss, shades: Path) -> None:
    a, data = named(NAMES), read_data(str(shades))
    assert data.features["label"].names != ["dark_grey", "Medium", "bright"]
    with pytest.warns(
        UserWarning, match=r"Medium, bright, dark_grey\) are not numbered as .*Dark grey, medium, BRIGHT"
    ):
        made = hf_stitch.stitch(a, a, data, source_layer="body", target_layer="body", matcher=matcher, progress=False)
    assert made.evaluation is not None
    assert made.evaluation["accuracy"].value == made.evaluation.scores["target"]["accuracy"].value == 1
    with pytest.warns(UserWarning, match="matched by name"):
        again = hf_stitch.evaluate(made, data, progress=False)
    assert again["accuracy"].value == 1 and again.data == Samples.of(data).fingerprint
    some = Samples.of(data.select(range(20, 60)))  # classes that are absent keep their numbers
    assert numbered_as(some, a.model.config).labels == [2] * 20 + [0] * 20


def test_labels_are_renumbered_once_for_each_class() -> None:
    samples = Samples.of(["a", "b", "c"], label=[0, 1, 1])
    twice = samples.renumbered([2, 0], ["x", "y", "z"]).renumbered([1, 2, 0], ["z", "x", "y"])
    assert (twice.labels, twice.label_names, twice.fingerprint) == ([0, 1, 1], ("z", "x", "y"), samples.fingerprint)
    for numbers in ([0], [0, 0], [0, 2], [-1, 0]):
        with pytest.raises(ValueError, match="numbers must"):
            samples.renumbered(numbers, ["x", "y"])


# -- on the command line -----------------------------------------------------------------------------------------------


def test_a_stitch_on_the_command_line_names_its_layers_and_its_folder_leads_to_the_model(
    shades: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    for name in "ab":
        config = transformers.ResNetConfig(
            embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic", id2label=NAMES
        )
        transformers.ResNetForImageClassification(config).save_pretrained(tmp_path / name)
        transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / name)
    out, run = tmp_path / "out", CliRunner().invoke
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = run(
            app,
            ["stitch", str(tmp_path / "a"), str(tmp_path / "b"), "--data", str(shades), "--out", str(out), "--json"],
        )
    assert made.exit_code == 0, made.stderr
    record = json.loads(made.stdout)
    layers = (record["source_layer"], record["target_layer"])
    found = hf_stitch.StitchedModel.from_pretrained(out / "model")
    assert layers == (found.source.cut.layer, found.target.cut.layer) and " → ".join(layers) in made.stderr
    for command in (["evaluate", "--data", str(shades)], ["push", "--private"]):
        failed = run(app, [command[0], str(out), *command[1:], *(["me/it"] if command[0] == "push" else [])])
        assert failed.exit_code == 1
        assert f"name one of its subfolders: {out / 'model'}, {out / 'stitcher'}" in failed.stderr.replace("\n", "")


def test_a_file_of_data_is_told_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "test.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"test\.parquet is a file: name its folder"):
        read_data(str(tmp_path / "test.parquet"))


def test_pinning_a_config_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, n_embd=8, n_head=1, n_layer=1)
    caplog.clear()
    logger = logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    before = logging.get_verbosity()
    try:
        assert settings_of_config(config).chosen["vocab_size"] == 50
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records and logging.get_verbosity() == before
