"""Programs that take any model of transformers take a stitched one: an object, or a folder by its path.

They are not dependencies: the extra ``clients`` installs them (``make test-all``).
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import hf_stitch
from hf_stitch import StitchedModel

from tiny_networks import LAYERS, TEXT, adapted, network, plain_tokenizer, stitched  # isort: skip

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]


def ending() -> Any:
    """The tokenizer, with a token for the end of texts."""
    processor = plain_tokenizer()
    processor.eos_token = "[SEP]"
    return processor


@pytest.fixture(scope="module")
def folder(texts: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stitched language model with a token for the end of texts, in a folder."""
    a, b = network("gpt2"), network("llama", 1)
    model = stitched(a, b, texts, (LAYERS["gpt2"], LAYERS["llama"]))
    model.processor = ending()
    place = tmp_path_factory.mktemp("language") / "model"
    model.save_pretrained(place)
    return place


def loaded(folder: Path) -> Any:
    return StitchedModel.from_pretrained(folder)


def lora() -> Any:
    return peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear")


COMMON: dict[str, Any] = {
    "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False, "save_strategy": "no", "logging_steps": 1,
    "learning_rate": 1e-2, "lr_scheduler_type": "constant", "per_device_train_batch_size": 4,
    "gradient_checkpointing": False,
}  # fmt: skip


# -- TRL ---------------------------------------------------------------------------------------------------------------
def sft(model: Any, folder: Path, texts: Any, steps: int = 20, **options: Any) -> tuple[Any, list[float]]:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    arguments = trl.SFTConfig(str(folder.parent / "sft"), max_steps=steps, max_length=16, **COMMON)
    data = datasets.Dataset.from_list([{"text": sample["text"]} for sample in texts[:40]])
    processor = loaded(folder).processor
    run = trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=processor, **options)
    run.train()
    return run, [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_sft(folder: Path, texts: Any, tmp_path: Path) -> None:
    """20 steps of an object and of a folder; the first loss is that of the model."""
    run, losses = sft(loaded(folder), folder, texts)
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.2
    batch = next(iter(run.get_train_dataloader()))
    with torch.no_grad():
        found = run.model.eval()(**batch)
        trl_loss = run.compute_loss(run.model, dict(batch))
    torch.testing.assert_close(trl_loss, found.loss, rtol=1e-4, atol=1e-5)
    run.save_model(str(tmp_path / "saved"))
    with torch.no_grad():
        assert torch.equal(loaded(tmp_path / "saved")(**batch).logits, found.logits)
    assert sft(str(folder), folder, texts)[1] == losses


def test_sft_with_an_adapter(folder: Path, texts: Any) -> None:
    run, losses = sft(loaded(folder), folder, texts, peft_config=lora())
    assert isinstance(run.model, peft.PeftModel)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("how", ["object", "folder", "adapter"])
def test_dpo(how: str, folder: Path, texts: Any) -> None:
    """Before the first step both models are equal: the loss is log 2."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows = [
        {"prompt": a["text"] + " ", "chosen": b["text"], "rejected": c["text"]}
        for a, b, c in zip(texts[:20], texts[20:40], texts[40:60], strict=True)
    ]
    run = trl.DPOTrainer(
        model=str(folder) if how == "folder" else loaded(folder),
        args=trl.DPOConfig(str(folder.parent / "dpo"), max_steps=5, max_length=32, **COMMON),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=loaded(folder).processor,
        **({"peft_config": lora()} if how == "adapter" else {}),
    )
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3)
    assert min(losses) < losses[0]


def test_rewards(texts: Any, tmp_path: Path) -> None:
    """A text classifier with one output; of equal texts neither is better, and the loss is log 2."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    config = transformers.BertConfig(**TEXT, num_labels=1)
    a = adapted("bert", transformers.BertForSequenceClassification(config).eval())
    data = [{"text": sample["text"], "label": float(sample["label"])} for sample in texts]
    model = stitched(a, a, data, (LAYERS["bert"], LAYERS["bert"]))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    run = trl.RewardTrainer(
        model=model,
        args=trl.RewardConfig(str(tmp_path), max_steps=3, max_length=32, **COMMON),
        train_dataset=datasets.Dataset.from_list([{"chosen": t["text"], "rejected": t["text"]} for t in texts[:20]]),
        processing_class=ending(),
    )
    run.train()
    assert run.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-3)


# -- lm-eval -----------------------------------------------------------------------------------------------------------
TASK = """task: tiny_texts
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""


def test_lm_eval(folder: Path, texts: Any, tmp_path: Path) -> None:
    """Bits per byte, of an object, of a folder, and of the command line in a process that does not import hf_stitch."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"text": each["text"]}) for each in texts[:20]))
    (tmp_path / "tiny.yaml").write_text(TASK.format(file=tmp_path / "data.jsonl"))
    model, total, size = loaded(folder), 0.0, 0
    for sample in texts[:20]:
        ids = torch.tensor([[model.processor.eos_token_id, *model.processor(sample["text"])["input_ids"]]])
        with torch.no_grad():
            known = model(input_ids=ids[:, :-1]).logits.double().log_softmax(-1)
        total, size = total - known[0].gather(1, ids[0, 1:, None]).sum().item(), size + len(sample["text"].encode())
    expected = total / size / math.log(2)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    for given in (HFLM(model, tokenizer=model.processor, batch_size=4), HFLM(str(folder), device="cpu")):
        found = lm_eval.simple_evaluate(given, tasks=["tiny_texts"], task_manager=manager, bootstrap_iters=0)
        assert found["results"]["tiny_texts"]["bits_per_byte,none"] == pytest.approx(expected, rel=1e-6)
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--tasks", "tiny_texts",
         "--model_args", f"pretrained={folder},trust_remote_code=True", "--include_path", str(tmp_path),
         "--output_path", str(tmp_path / "out.json")],
        capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (written,) = tmp_path.glob("out*.json")
    found = json.loads(written.read_text())
    assert found["results"]["tiny_texts"]["bits_per_byte,none"] == pytest.approx(expected, rel=1e-6)


# -- others ------------------------------------------------------------------------------------------------------------
def test_sentence_transformers(headed: Any, tmp_path: Path) -> None:
    """A mean over the tokens of a text, of a folder with a model without a head; saved and loaded."""
    st = pytest.importorskip("sentence_transformers")
    model, _ = headed("features")
    model.save_pretrained(tmp_path / "model")
    encoder, words = st.SentenceTransformer(str(tmp_path / "model"), device="cpu"), ["w1 w2 w3", "w4"]
    inputs = model.preprocess(words)
    with torch.no_grad():
        states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
    expected = (states * mask).sum(1) / mask.sum(1)
    torch.testing.assert_close(torch.tensor(encoder.encode(words)), expected, rtol=1e-4, atol=1e-5)
    encoder.save_pretrained(str(tmp_path / "saved"))
    again = st.SentenceTransformer(str(tmp_path / "saved"), device="cpu", model_kwargs={"allow_modified": True})
    torch.testing.assert_close(torch.tensor(again.encode(words)), expected, rtol=1e-4, atol=1e-5)


def test_lightning(headed: Any, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    model, given = headed("bert-bert")

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    rows = [{name: value[i] for name, value in given.items()} for i in range(6)]
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path}
    trainer = lightning.Trainer(max_steps=3, **options)
    trainer.fit(module := Module(), torch.utils.data.DataLoader(rows, 2))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    module.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"])
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["image", "bert-bert"])
def test_onnx(kind: str, headed: Any, tmp_path: Path) -> None:
    """The exported model computes the same, for another number of samples too."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, given = headed(kind)
    del given["labels"]
    batch = torch.export.Dim("batch", min=2, max=64)
    model.config.return_dict = False
    torch.onnx.export(
        model.eval(), (), tmp_path / "model.onnx", kwargs=given, dynamo=True,
        dynamic_shapes={"inputs" if name == "inputs" else name: {0: batch} for name in given}, verbose=False,
    )  # fmt: skip
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    few = {name: value[:3] for name, value in given.items()}
    found = session.run(None, {name: value.numpy() for name, value in few.items()})[0]
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(found), model(**few)[0], rtol=1e-3, atol=1e-4)


KINDS = ["image", "bert-bert", "roberta-bert", "tokens", "features", "gpt2-llama"]


@pytest.mark.parametrize("kind", KINDS)
def test_torchinfo(kind: str, headed: Any) -> None:
    """Shapes of both halves and of the stitch, from a batch and from sizes; each weight counts once."""
    torchinfo = pytest.importorskip("torchinfo")
    model, given = headed(kind)
    given.pop("labels", None)
    values = given[model.main_input_name]
    sizes = {"input_size": tuple(values.shape), "dtypes": [values.dtype]}
    with torch.no_grad():
        leaving, mapped, output = model.source(**given).values, model.transfer(**given).values, model(**given)
    for named in ({"input_data": given}, sizes):
        found = torchinfo.summary(model, verbose=0, cache_forward_pass=False, **named)
        rows = {(row.var_name, row.depth): row for row in found.summary_list}
        front, stitch, back = (rows[name, 1] for name in ("source", "stitch", "target"))
        assert front.output_size[1:] == stitch.input_size[1:] == [*leaving.shape][1:]
        assert stitch.output_size[1:] == back.input_size[1:] == [*mapped.shape][1:]
        assert back.executed and found.total_mult_adds > 0
        assert found.total_params == sum(weight.numel() for weight in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(**given)[0], output[0])


@pytest.mark.parametrize("kind", KINDS)
def test_torchview(kind: str, headed: Any) -> None:
    """One arrow from each half to the next, and from the inputs to the outputs."""
    torchview = pytest.importorskip("torchview")
    model, given = headed(kind)
    given.pop("labels", None)
    drawn = torchview.draw_graph(model, input_data=given, depth=1).visual_graph.source
    titles = dict(re.findall(r"\n\t(\d+) \[label=.*?>([\w-]+)<BR/>", drawn, re.DOTALL))
    after: dict[str, set[str]] = {}
    for a, b in re.findall(r"\n\t(\d+) -> (\d+)", drawn):
        after.setdefault(a, set()).add(b)
    (at,) = (node for node, title in titles.items() if title == "Front")
    assert any(at in after.get(node, ()) for node, title in titles.items() if title == "input-tensor")
    for title in ("StitchingLayer", "Back", "output-tensor"):
        for _ in range(2):  # with a cast between them
            reached = {node for node in after[at] if titles[node] == title}
            at = min(reached or (node for node in after[at] if titles[node] == "to"))
            if reached:
                break
        assert titles[at] == title


def test_accelerate(headed: Any, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, given = headed("bert-bert")
    accelerator = accelerate.Accelerator(cpu=True)
    ready, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    accelerator.backward(ready(**given).loss)
    optimizer.step()
    whole = accelerator.unwrap_model(ready)
    whole.save_pretrained(tmp_path, state_dict=accelerator.get_state_dict(ready), is_main_process=True)
    again = StitchedModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**given).logits, whole.eval()(**given).logits)


# -- a process without an import of hf_stitch --------------------------------------------------------------------------
LOAD = """
import json, sys
{imports}
kinds = t.AutoTokenizer, t.AutoConfig, t.AutoModel, t.AutoModelForCausalLM
print(*[type(kind.from_pretrained(sys.argv[1]{options})).__name__ for kind in kinds])
print(t.pipeline("text-generation", model=sys.argv[1]{options})("w1 w2", max_new_tokens=2)[0]["generated_text"])
model = t.AutoModelForCausalLM.from_pretrained(sys.argv[1]{options})
model.save_pretrained(sys.argv[2])
"""
IMPORTS = {
    "transformers first": ("import transformers as t; t.AutoConfig; import hf_stitch", ""),
    "looked for before": (
        "import hf_stitch, importlib.util as u; u.find_spec('transformers.models.auto.configuration_auto')\n"
        "import transformers as t; assert t.AutoConfig.for_model('hf_stitch', task=None).model_type == 'hf_stitch'",
        "",
    ),
    "trust": ("import transformers as t", ", trust_remote_code=True"),
    "neither": ("import transformers as t", ""),
}


@pytest.mark.parametrize("how", IMPORTS)
def test_another_process_loads_a_folder(how: str, folder: Path, tmp_path: Path) -> None:
    imports, options = IMPORTS[how]
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(imports=imports, options=options), str(folder), str(tmp_path / "again")],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    if how == "neither":
        assert done.returncode != 0
        assert "trust_remote_code=True" in done.stderr
        return
    assert done.returncode == 0, done.stderr[-2000:]
    kinds, text = done.stdout.splitlines()[:2]
    assert kinds.split()[1:] == ["StitchConfig", "StitchedModelForCausalLM", "StitchedModelForCausalLM"]
    assert text.startswith("w1 w2")
    assert {each.name for each in (tmp_path / "again").iterdir()} == {each.name for each in folder.iterdir()}
    with torch.no_grad():
        ids = torch.tensor([[7, 8, 9]])
        assert torch.equal(loaded(tmp_path / "again")(input_ids=ids).logits, loaded(folder)(input_ids=ids).logits)


def test_options_without_a_value_pass(folder: Path) -> None:
    keys = (
        "gguf_file",
        "quantization_config",
        "tp_plan",
        "key_mapping",
        "use_safetensors",
        "offload_folder",
        "variant",
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **dict.fromkeys(keys))
    assert type(model) is hf_stitch.StitchedModelForCausalLM
