"""Ports, dtypes, kernels, exports and faults of trained networks, and what a change of them did."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hf_stitch_versions import diff, same
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

import hf_stitch
from benchmarks.real import data, networks
from benchmarks.real.places import QUIET, Places
from hf_stitch import Adapter


def original_lite(places: Places, network: Adapter, folder: Path) -> Any:
    """Return the network in the class of another package, whose modules have other names."""
    (images,) = network.example.values()
    return hf_stitch.load(networks.original_lite(0), example_inputs=images, processor=network.processor)


def bfloat16(places: Places, network: Adapter, folder: Path) -> Any:
    """Return a copy in bfloat16."""
    return hf_stitch.load(copy.deepcopy(network.model).bfloat16(), processor=network.processor)


def sdpa(places: Places, network: Adapter, folder: Path) -> Any:
    """Return a copy with another implementation of attention."""
    model = copy.deepcopy(network.model)
    model.set_attn_implementation("eager" if model.config._attn_implementation == "sdpa" else "sdpa")
    return hf_stitch.load(model, processor=network.processor)


class Plain(nn.Module):
    """Encoder with positional inputs and one output, as the TorchScript exporter requires."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the last hidden state."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def exported(places: Places, network: Adapter, folder: Path, dynamo: bool) -> Any:
    """Export to ONNX by one of the exporters of torch."""
    file = folder / "network.onnx"
    if "input_ids" in network.example:
        inputs = {name: torch.ones(2, 6, dtype=torch.long) for name in ("input_ids", "attention_mask")}
        axes = {name: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for name in inputs}
    else:
        inputs = {"x": torch.randn(2, *next(iter(network.example.values())).shape[1:])}
        axes = {"x": {0: torch.export.Dim.DYNAMIC}}
    if dynamo:
        torch.onnx.export(network.model, kwargs=inputs, f=str(file), dynamo=True, dynamic_shapes=axes)
    else:
        torch.onnx.export(
            Plain(network.model), tuple(inputs.values()), str(file), dynamo=False, input_names=list(inputs),
            dynamic_axes={name: dict(enumerate(("batch", "length"))) for name in inputs},
        )  # fmt: skip
    return str(file)


def int8(places: Places, network: Adapter, folder: Path = Path()) -> Adapter:
    """Return a copy with the weights of linear layers rounded to 8 bits, one scale for each row."""
    model = copy.deepcopy(network.model)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            scale = module.weight.data.abs().amax(1, keepdim=True) / 127
            module.weight.data = (module.weight.data / scale).round() * scale
    return hf_stitch.load(model, processor=network.processor)


def openvino(places: Places, network: Adapter, folder: Path) -> Any:
    """Convert to OpenVINO in float32."""
    import openvino as ov

    model = copy.deepcopy(network.model)
    model.set_attn_implementation("eager")
    forward = model.forward
    model.forward = lambda input_ids, attention_mask: forward(input_ids, attention_mask).last_hidden_state
    inputs = {name: torch.ones(2, 6, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    ov.save_model(ov.convert_model(model, example_input=inputs), folder / "model.xml", compress_to_fp16=False)
    return f"openvino:{folder / 'model.xml'}"


def keras(places: Places, network: Adapter, folder: Path) -> Any:
    """Save the network inside a network with a head, whose names keras-hub expects.

    It needs the interpreter of an environment with keras-hub.
    """
    whole = BertForMaskedLM(network.model.config)
    whole.bert = network.model
    whole.save_pretrained(folder)
    return f"keras:{folder}"


FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "eps of one norm": ("encoder.layer.3.output.LayerNorm", lambda m: setattr(
        m.encoder.layer[3].output.LayerNorm, "eps", 1e-3)),
    "tanh GELU in one block": ("encoder.layer.2.intermediate.intermediate_act_fn", lambda m: setattr(
        m.encoder.layer[2].intermediate, "intermediate_act_fn", nn.GELU("tanh"))),
    "heads in another order": ("encoder.layer.4.attention.output.dense", lambda m: m.encoder.layer[
        4].attention.output.dense.weight.data.copy_(m.encoder.layer[4].attention.output.dense.weight.data.unflatten(
            1, (12, 32)).flip(1).flatten(1))),
    "a bias lost": ("encoder.layer.1.attention.self.query", lambda m: m.encoder.layer[
        1].attention.self.query.bias.data.zero_()),
    "positions off by one": ("embeddings.position_embeddings", lambda m: m.embeddings.position_embeddings.weight.data
        .copy_(m.embeddings.position_embeddings.weight.data.roll(1, 0))),
    "two blocks exchanged": ("encoder.layer.2", lambda m: m.encoder.layer.insert(2, m.encoder.layer.pop(3))),
}  # fmt: skip
"""Fault -> the module that `same` must name first (or one inside or around it), and how it is planted in BERT."""


def faulty(places: Places, network: Adapter, folder: Path, fault: str) -> Any:
    """Return a copy with a planted fault."""
    model = copy.deepcopy(network.model)
    FAULTS[fault][1](model)
    return hf_stitch.load(model, processor=network.processor)


def compared(
    places: Places, name: str, port: Callable[[Places, Adapter, Path], Any], module: str | None = None
) -> dict[str, Any]:
    """Compare a network with its port; a network of no fault must be the same, a fault must be named."""
    network = places.network(name)
    samples = data.samples(places.kind(name), places.data, 24)
    with tempfile.TemporaryDirectory() as folder:
        other = port(places, network, Path(folder))
        options: dict[str, Any] = {"python": places.python} if str(other).startswith("keras:") else {}
        found = same(network, other, samples, **options, **QUIET)
    first = found.findings[0].module if found.findings else None
    ratio = max((row.ratio for row in found.modules), default=0.0)
    if module is None:
        holds = found.is_same
    else:
        holds = first is not None and (first.startswith(module) or (module.startswith(first) and first != ""))
    return {"outcome": str(found.verdict).replace("|", "/").replace("\n", " "), "holds": holds, "ratio": ratio}


# -- what changed ------------------------------------------------------------------------------------------------------


def classifier(places: Places, name: str) -> Adapter:
    """Return a classifier of the six classes of TREC: an encoder with a head, fine-tuned except for its embeddings."""
    torch.manual_seed(0)
    network = places.network(name)
    config = BertConfig.from_dict({**network.model.config.to_dict(), "num_labels": 6})
    model = BertForSequenceClassification(config).eval()
    model.bert.load_state_dict(network.model.state_dict(), strict=False)
    adapter = hf_stitch.load(model, processor=network.processor)
    return trained(adapter, places, lambda name: "embeddings" not in name, 1e-4, 2)


def trained(
    network: Adapter, places: Places, chosen: Callable[[str], bool], rate: float, epochs: int, count: int = 1500
) -> Adapter:
    """Return a copy of a classifier whose chosen weights were trained on questions of TREC."""
    torch.manual_seed(0)
    model = copy.deepcopy(network.model)
    weights = [weight.requires_grad_(chosen(name)) for name, weight in model.named_parameters()]
    optimizer = torch.optim.AdamW([weight for weight in weights if weight.requires_grad], lr=rate)
    questions = data.questions("train", places.data, count)
    for _ in range(epochs):
        for batch in questions.batches(32):
            optimizer.zero_grad()
            logits = model(**network.preprocess(batch.samples)).logits
            functional.cross_entropy(logits, torch.tensor(batch.labels)).backward()
            optimizer.step()
    return hf_stitch.load(model.requires_grad_(True).eval(), processor=network.processor)


def tuned(places: Places, network: Adapter) -> Adapter:
    """Fine-tune block 4 alone."""
    return trained(network, places, lambda name: ".layer.4." in name, 2e-4, 1)


def tuned_whole(places: Places, network: Adapter) -> Adapter:
    """Fine-tune all weights for one epoch."""
    return trained(network, places, lambda name: True, 2e-5, 1)


def pruned(places: Places, network: Adapter) -> Adapter:
    """Set the smallest third of the weights of each linear layer to zero."""
    model = copy.deepcopy(network.model)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features > 6:
            limit = module.weight.data.abs().flatten().quantile(1 / 3)
            module.weight.data[module.weight.data.abs() < limit] = 0
    return hf_stitch.load(model, processor=network.processor)


def changed(
    places: Places, name: str, change: Callable[[Places, Adapter], Adapter], part: str | None = None
) -> dict[str, Any]:
    """Compare two versions on questions that trained neither; the part that was tuned must be the first cause."""
    base = classifier(places, name)
    found = diff(base, change(places, base), data.questions("test", places.data, 300), **QUIET)
    causes = [cause.name if hasattr(cause, "name") else str(cause) for cause in found.causes]
    holds = causes[:1] == [part] if part else None
    return {"outcome": str(found.verdict).replace("|", "/").replace("\n", " "), "holds": holds, "causes": causes}


PORTS: dict[str, Callable[..., Any]] = {
    "bfloat16": bfloat16, "another attention": sdpa, "ONNX by dynamo": partial(exported, dynamo=True),
    "ONNX by TorchScript": partial(exported, dynamo=False), "OpenVINO": openvino, "Keras": keras,
}  # fmt: skip

ROWS: dict[str, tuple[Any, ...]] = {
    "same: lite0, class of another package": (partial(compared, port=original_lite), "lite0"),
    "same: lite0, ONNX by dynamo": (partial(compared, port=partial(exported, dynamo=True)), "lite0"),
    **{f"same: MiniLM, {port}": (partial(compared, port=make), "MiniLM") for port, make in PORTS.items()},
    **{
        f"same: MiniLM, {fault}": (partial(compared, port=partial(faulty, fault=fault), module=module), "MiniLM")
        for fault, (module, _) in FAULTS.items()
    },
    "same: MiniLM, int8": (partial(compared, port=int8, module="encoder.layer.0.attention.self"), "MiniLM"),
    "diff: MiniLM, int8": (partial(changed, change=int8), "MiniLM"),
    "diff: MiniLM, a third of the weights pruned": (partial(changed, change=pruned), "MiniLM"),
    "diff: MiniLM, block 4 tuned": (partial(changed, change=tuned, part="bert.encoder.layer.4"), "MiniLM"),
    "diff: MiniLM, all tuned": (partial(changed, change=tuned_whole), "MiniLM"),
}
