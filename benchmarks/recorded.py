"""Recorded jobs: results of every verb on tiny deterministic networks, to compare two versions bit for bit.

``python benchmarks/recorded.py write FOLDER`` runs all jobs and writes one file per job; ``check FOLDER`` runs them
again, prints each value that differs, and exits with 1 if any does. Jobs use the ``hf_stitch`` that Python finds first,
by its public names alone, so ``PYTHONPATH`` selects the version to check.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import logging
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import hf_stitch
from hf_stitch import Samples, StitchedModel
from hf_stitch.training import SimilarityCallback, StitchabilityCallback, TaskLoss

if not __package__:  # as a script, import the networks of this folder, whichever hf_stitch is installed
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.networks import CLASSES, IMAGES, build, data, images, net, texts, tokenizer

LEFT_OUT = ("versions", "transformers_version", "checksum")
"""Keys with values that depend on versions: the checksum covers a record that contains versions."""

QUIET: dict[str, Any] = {"batch_size": 16, "progress": False}
SHORT: dict[str, Any] = {"epochs": 2, "batch_size": 16}


# -- jobs -----------------------------------------------------------------------------------------------------------
def stitched(a: str = "vit", b: str = "vit", samples: Any = None, cuts: Any = (1, 2), **options: Any) -> Any:
    """Stitch two networks."""
    layers = {"source_layer": net(a).layers[cuts[0]], "target_layer": net(b, 1).layers[cuts[1]]}
    return hf_stitch.stitch(net(a), net(b, 1), samples or data(a), **{**layers, **QUIET, **options})


def grid(a: str = "vit", b: str = "vit", matchers: Any = ("ridge",), count: int = 2, **options: Any) -> Any:
    """Stitch two networks at all pairs of their first cuts."""
    layers = {"layers_a": net(a).layers[:count], "layers_b": net(b, 1).layers[:count], "resamples": 200}
    return hf_stitch.stitch_grid(net(a), net(b, 1), data(a), matchers=matchers, **{**layers, **QUIET, **options})


def unsupervised() -> Any:
    """Stitch a network of points in clusters to itself, without pairs (by the plugin hf-stitch-embeddings)."""
    points = (3 * torch.randn(25, 8)).repeat(24, 1) + 0.3 * torch.randn(600, 8)
    network = hf_stitch.load(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3)), example_inputs=points[:2])
    layers: Any = {"source_layer": "0", "target_layer": "0", "clusters": (25,), "restarts": 50}
    model = hf_stitch.stitch(network, network, points, matcher="unsupervised", **layers, **QUIET)
    return [model.stitch, model.config.recipe, model.evaluation]


def chained() -> Any:
    """Stitch a stitched model to a third network."""
    model, third = stitched(), net("vit", 2)
    layers: Any = {"source_layer": hf_stitch.load(model).layers[-1], "target_layer": third.layers[1]}
    return hf_stitch.stitch(model, third, data(seed=2), **layers, **QUIET)


def relative(similarities: Any = "cosine", seed: int = 0, **options: Any) -> Any:
    """Build a model with a head that reads similarities to anchors."""
    encoder = net("vit", seed)
    torch.manual_seed(3)
    arguments: Any = {"layer": encoder.layers[2], "num_labels": CLASSES, **QUIET, **options}
    return hf_stitch.relative_model(encoder, data(n=30, seed=2), similarities, **arguments)


def swapped(model: Any, encoder: str = "cnn", **options: Any) -> Any:
    """Exchange the encoder of a model, and score it."""
    new_encoder = net(encoder, 1)
    arguments = {"anchors": data(n=30, seed=2), "encoder_layer": new_encoder.layers[1], "data": data(seed=3)}
    return hf_stitch.swap(model, new_encoder, **{**arguments, **QUIET, **options})


def audited(models: Any, kind: str = "vit", **options: Any) -> Any:
    """Audit stitched models; their recipes store the verdict."""
    audits = hf_stitch.audit(models, data(kind, seed=1), resamples=200, **QUIET, **options)
    return [audits, [model.config.recipe for model in (models if isinstance(models, list) else [models])]]


def compared(a: str, b: str, samples: Any, *metrics: str, **options: Any) -> Any:
    """Compare two networks at their first cuts."""
    layers: Any = {"layers_a": net(a).layers[:3], "layers_b": net(b, 1).layers[:3], **QUIET}
    return hf_stitch.compare(net(a), net(b, 1), samples, metrics=metrics, **layers, **options)


def evaluated(model: StitchedModel, samples: Any, **options: Any) -> Any:
    """Score a stitched model on other samples."""
    return hf_stitch.evaluate(model, samples, resamples=200, **QUIET, **options)


def loaded(model: StitchedModel) -> Any:
    """Score a stitched model that was saved and loaded, and its stitcher, attached again."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/model")
        model.stitcher.save_pretrained(f"{folder}/stitcher")
        again = StitchedModel.from_pretrained(f"{folder}/model")
        attached = hf_stitch.Stitcher.from_pretrained(f"{folder}/stitcher").attach(net("vit"), net("vit", 1))
    return [evaluated(model, data(seed=1), target=net("vit", 1), source=net("vit")) for model in (again, attached)]


def trained(a: str = "vit", b: str = "vit", **options: Any) -> Any:
    """Train the stitch of a model on the task."""
    return TaskLoss(**{**SHORT, **options}).fit(stitched(a, b), data(a), progress=False)


def watched() -> Any:
    """Train a network for two epochs, with both callbacks."""
    network, rows = build("vit", 5), zip(images(), data().labels or (), strict=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, num_train_epochs=2, per_device_train_batch_size=16, report_to=[], seed=3, use_cpu=True,
            disable_tqdm=True, save_strategy="no", logging_strategy="no",
        )  # fmt: skip
        pairs: Any = [{"pixel_values": image, "labels": label} for image, label in rows]
        trainer = transformers.Trainer(network.model, arguments, train_dataset=pairs)
        trainer.remove_callback(transformers.PrinterCallback)
        callbacks = [
            StitchabilityCallback(net("vit", 1), data(), network.layers[:2], batch_size=16),
            SimilarityCallback("start", images(32, 1), network.layers, ("linear_cka", "procrustes"), batch_size=16),
            SimilarityCallback(net("cnn"), images(32, 1), network.layers[:2], every=3, batch_size=16),
        ]
        for callback in callbacks:
            callback.attach(trainer, network)
        trainer.train()
    return [network.model, [callback.to_history() for callback in callbacks]]


def generated() -> Any:
    """Generate with two stitched decoders."""
    prompts = tokenizer()(texts(3, 4), return_tensors="pt", padding=True, padding_side="left")
    inputs: Any = {"input_ids": prompts["input_ids"], "attention_mask": prompts["attention_mask"], "pad_token_id": 0}
    models = stitched("gpt2", "llama"), stitched("letters", "llama", align="prefix")
    return [model.generate(**inputs, max_new_tokens=6, do_sample=False) for model in models]


CLOSED = """
    lstsq ridge:ridge=0.5 procrustes:scale=True low_rank:rank=8 low_rank_residual:rank=4 lasso:alpha=0.1 permutation
    random recoloured inverse_relative ridge_to_identity identity piecewise:clusters=4 residual_mlp:epochs=2
    retrieval:epochs=2
"""
"""Matchers of moments and of rows."""
PAIR = ("mahalanobis", "likelihood_ratio")
METRICS = ("linear_cka:debiased=True", "minibatch_cka", "procrustes", "rbf_cka", "svcca", "mutual_knn", "soft_matching")
MIXED = ("linear_cka", "weight_cosine")
FAR = 5 * images(24, 4)
JOBS: dict[str, Callable[[], Any]] = {
    **{f"stitch-{spec.split(':')[0]}": partial(stitched, matcher=spec) for spec in CLOSED.split()},
    **{f"stitch-{how}": partial(stitched, matcher="ridge", pooling=how) for how in ("mean", "cls", "flatten")},
    "stitch-last": partial(stitched, "bert", "roberta", pooling="last", matcher="ridge"),
    "stitch-enlarged": partial(stitched, "cnn", "vit", matcher="ridge"),
    "stitch-reduced": partial(stitched, "vit", "cnn", matcher="ridge"),
    "stitch-texts": partial(stitched, "bert", "roberta", test_size=20, seed=3),
    "stitch-auto": partial(stitched, source_layer="auto", target_layer="auto"),
    "stitch-test-data": lambda: stitched(test_data=data(seed=1)),
    "stitch-paired-data": lambda: stitched("bert", "roberta", paired_data=data("bert", seed=1), pooling="mean"),
    "stitch-unlabelled": lambda: stitched(samples=Samples.of(images())),
    "stitch-headless": lambda: [stitched("encoder", "encoder"), stitched(task=None)],
    "stitch-seeded": lambda: stitched(matcher="seeded_refinement", unpaired=(images(24, 1), images(24, 2))),
    "stitch-unsupervised": unsupervised,
    "stitch-attention": partial(stitched, "gpt2", "llama", matcher="attention:causal=True,width=16"),
    "stitch-tokens": partial(stitched, "gpt2", "llama"),
    "stitch-prefix": partial(stitched, "letters", "llama", align="prefix"),
    "stitch-prefix-own": partial(stitched, "letters", "llama", align="prefix", own=True, matcher="ridge"),
    "stitch-chain": chained,
    "stitch-trained": lambda: stitched(matcher=TaskLoss(**SHORT)),
    "stitch-trained-rows": lambda: stitched(matcher=TaskLoss(**SHORT, initial="piecewise", labels="hard")),
    "stitch-trained-tokens": lambda: stitched("gpt2", "llama", matcher=TaskLoss(**SHORT)),
    "grid": partial(grid, matchers=("lstsq", "ridge", "low_rank:rank=4"), detectors=PAIR, far_data=FAR),
    "grid-sizes": lambda: grid("cnn", "vit", ("ridge", "procrustes"), test_data=data(n=32, seed=1)),
    "grid-classifier": partial(grid, detectors=("classifier:epochs=1,hidden=8",), count=1),
    "grid-pooled": partial(grid, "bert", "roberta", ("ridge", "identity"), pooling="cls", detectors=("knn:k=3",)),
    "grid-trained": lambda: grid(matchers=("lstsq", TaskLoss(**SHORT))),
    "grid-tokens": partial(grid, "gpt2", "llama", ("lstsq", "ridge"), detectors=PAIR),
    "grid-prefix": partial(grid, "letters", "llama", align="prefix", own=True),
    "swap-relative": lambda: swapped(relative(), pooling="mean"),
    "swap-similarities": lambda: swapped(relative(["cosine", "euclidean"], center=True)),
    "swap-between": lambda: hf_stitch.swap(relative(), relative(seed=1), data=data(seed=3), **QUIET),
    "swap-absolute": lambda: swapped(relative(None), matcher="ridge", baselines=["lstsq", "procrustes"]),
    "swap-network": lambda: swapped(net("vit"), target_layer=net("vit").layers[2], pooling="mean"),
    "swap-again": lambda: swapped(swapped(relative(None), data=None), "vit"),
    "audit": lambda: audited(stitched(), far_data=FAR),
    "audit-several": lambda: audited([stitched(), stitched(places=(2, 1))], detectors=PAIR, train_data=data(seed=2)),
    "audit-pooled": lambda: audited(stitched("bert", "roberta", pooling="cls"), "bert"),
    "audit-tokens": lambda: audited(stitched("gpt2", "llama"), "gpt2"),
    "compare": lambda: compared("vit", "vit", data(), "linear_cka", "procrustes", "rsa", permutations=20, seed=1),
    "compare-metrics": lambda: compared("vit", "vit", images(), *METRICS),
    "compare-positions": lambda: compared("vit", "cnn", images(), *METRICS[:3], rows="resized"),
    "compare-offsets": lambda: compared("letters", "llama", texts(), "linear_cka", rows="positions", align="offsets"),
    "compare-paired-data": lambda: compared("bert", "roberta", texts(), "linear_cka", paired_data=texts(seed=1)),
    "compare-activations": lambda: hf_stitch.compare(
        *(hf_stitch.analysis.extract_activations(net(kind), data(), **QUIET) for kind in IMAGES), **QUIET
    ),
    "compare-weights": lambda: hf_stitch.compare(net("cnn"), net("cnn", 1), images(), metrics=MIXED, **QUIET),
    "compare-all": lambda: hf_stitch.compare_all([net("vit"), net("vit", 1)], data(), resamples=10, **QUIET),
    "evaluate": lambda: evaluated(stitched(), data(seed=1), examples=5, baselines={"other": stitched(seed=1).stitch}),
    "evaluate-unlabelled": lambda: evaluated(stitched("bert", "roberta"), texts(seed=1), paired_data=texts(seed=2)),
    "evaluate-tokens": lambda: evaluated(stitched("gpt2", "llama"), texts(seed=1), examples=3),
    "evaluate-prefix": lambda: evaluated(stitched("letters", "llama", align="prefix"), texts(seed=1)),
    "evaluate-vectors": lambda: evaluated(stitched("encoder", "encoder"), data("encoder", seed=1)),
    "evaluate-loaded": lambda: loaded(stitched()),
    "generate": generated,
    "train-hard": partial(trained, labels="hard", penalties={"l1": 1e-4, "linear_cka": 0.1}),
    "train-features": partial(trained, feature_steps=3, max_steps=5, schedule="cosine"),
    "train-orthogonal": partial(trained, orthogonal=True, labels={"target": 0.5, "source": 0.5}),
    "train-tokens": partial(trained, "gpt2", "llama", labels="hard", max_grad_norm=1.0),
    "train-watched": watched,
}  # fmt: skip


# -- records --------------------------------------------------------------------------------------------------------
def values(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of a result with their paths: floats in hexadecimal, tensors as hashes."""
    if isinstance(node, StitchedModel):
        node = {"evaluation": node.evaluation, "saved": saved(node)}
    elif isinstance(node, hf_stitch.analysis.StitchGrid):
        node = {**node.to_dict(), "stitches": node.stitches}
    elif isinstance(node, nn.Module):
        node = {"weights": node.state_dict(), **(node.to_dict() if hasattr(node, "to_dict") else {})}
    elif hasattr(node, "to_dict"):
        node = node.to_dict()
    if isinstance(node, Tensor):
        content = node.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield path, f"{node.dtype} {tuple(node.shape)} {hashlib.sha256(content).hexdigest()}"
    elif isinstance(node, Mapping | list | tuple) and node:
        for key, child in node.items() if isinstance(node, Mapping) else enumerate(node):
            if key not in LEFT_OUT:
                yield from values(child, f"{path}/{key}")
    else:
        yield path, node.hex() if isinstance(node, float) else repr(node)


def saved(model: StitchedModel) -> dict[str, Any]:
    """Return the files of a saved stitched model: tensors and records."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files: dict[str, Any] = {path.name: load_file(path) for path in Path(folder).rglob("*.safetensors")}
        return files | {path.name: json.loads(path.read_text()) for path in Path(folder).rglob("*.json")}


def run(name: str) -> dict[str, str]:
    """Run a job, and return path -> value, or the error of a job that fails."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    try:
        return dict(values(JOBS[name]()))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> int:
    """Write the records of all jobs, or compare them with the records in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("write", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="run jobs that match, e.g. 'grid*'")
    options = parser.parse_args()
    print(f"hf_stitch {hf_stitch.__version__} in {Path(hf_stitch.__file__).parent}")
    options.folder.mkdir(parents=True, exist_ok=True)
    failed, chosen = 0, fnmatch.filter(JOBS, options.only)
    if not chosen:
        parser.error(f"no job matches {options.only!r}: {', '.join(JOBS)}")
    for name in chosen:
        path, start = options.folder / f"{name}.json", time.process_time()
        current = run(name)
        if options.action == "write":
            path.write_text(json.dumps(current, indent=0) + "\n")
        before = json.loads(path.read_text()) if path.exists() else {}
        changed = [key for key in {**before, **current} if key == "error" or before.get(key) != current.get(key)]
        failed += bool(changed)
        print(f"{name}: {len(current)} values, {len(changed)} differ, {time.process_time() - start:.1f} s", flush=True)
        for key in changed:
            print(f"  {key}: {before.get(key, 'absent')} -> {current.get(key, 'absent')}")
    print(f"{failed} of {len(chosen)} jobs differ or fail")
    return int(failed > 0)


if __name__ == "__main__":  # settings of the whole process, which a test of main would keep
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    sys.exit(main())
