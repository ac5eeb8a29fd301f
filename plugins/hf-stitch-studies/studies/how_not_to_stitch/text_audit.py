"""Are stitches of text encoders accurate, and are their activations in distribution for the target?

This study goes beyond Balogh & Jelasity 2025, who stitch image classifiers only. Two small BERTs that differ in their
seed classify the questions of TREC. Every layer of the source, and of its untrained twin, is stitched into every layer
of the target by least squares, by least squares that keep the covariance, and by task loss. All stitches are audited
together.

A gentler task loss, to test whether the step size makes stitches strange, was added after the first figures and outside
the rule.
"""

import collections
import copy
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import study
import torch
from dr_frankenstein.stitching import logits
from relative_representations import text_encoders, texts
from relative_representations.training import train
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

import hf_stitch
from hf_stitch import Adapter, Samples
from hf_stitch.analysis import Audit
from hf_stitch.analysis.detection.result import FAR
from hf_stitch.training import TaskLoss

DIRECT = ("lstsq", "recoloured")
TASK, GENTLE = "task loss", "gentle task loss"
TRAINED, UNTRAINED, ITSELF = "other seed", "untrained twin", "itself"
"""Sources of the stitches; the last is a control."""
MAX_DOSE = 0.2
"""Maximum dose of activations in distribution, the default of an audit."""
IN_DISTRIBUTION, OUT_OF_DISTRIBUTION, LEAST = 0.8, 0.5, 5
"""Shares and minimum number of stitches of the rule."""


SIZES = {
    "train": 5452,
    "test": 500,
    "known": 1500,
    "far": 300,
    "width": 64,
    "vocabulary": 2000,
    "epochs": 8,
    "steps": 300,
}
"""Training questions of the encoders, and test questions; training questions for the fits of stitches and detectors;
Spanish sentences; width, tokens and epochs of an encoder; steps of task-loss matching."""
DEPTH = 4
"""Layers of an encoder."""
SLOW = max(SIZES["steps"] // 3, 1)
OPTIONS: dict[str, Any] = {"labels": "hard", "batch_size": 32, "schedule": "constant"}
TASK_LOSS = {
    TASK: TaskLoss(**OPTIONS, max_steps=SIZES["steps"], lr=3e-3), GENTLE: TaskLoss(**OPTIONS, max_steps=SLOW, lr=1e-3)
}  # fmt: skip
"""Starts from least squares. Gentle: fewer and smaller steps."""


def main() -> None:
    arguments, start = study.parser(__doc__, "data-dir").parse_args(), time.perf_counter()
    questions, test = (texts.trec(split, SIZES[split], arguments.data_dir) for split in ("train", "test"))
    far = texts.read(texts.TATOEBA, "test", SIZES["far"], arguments.data_dir, text="es", id="id")
    tokenizer = text_encoders.trained_tokenizer(
        text_encoders.Recipe("roberta", epochs=0, vocabulary=SIZES["vocabulary"]), texts.plain(questions)
    )
    target, source = (encoder(seed, tokenizer, questions) for seed in (1, 0))
    twin = encoder(0, tokenizer, questions, trained=False)
    fitting = questions.take(SIZES["known"])
    record = {
        "preset": SIZES,
        "accuracy": accuracies({"source": source, "target": target, "untrained twin": twin}, questions, test),
        "layers": [layer.rpartition(".")[2] for layer in target.layers],
        "audits": audited({TRAINED: source, UNTRAINED: twin, ITSELF: target}, target, fitting, test, far),
        "seconds": round(time.perf_counter() - start),
    }  # fmt: skip
    study.write_results("text_audit", record, page, arguments.out)


def encoder(seed: int, tokenizer: PreTrainedTokenizerFast, questions: Samples, *, trained: bool = True) -> Adapter:
    """Create a BERT from its config, and train it on the classes of the questions (untrained: its twin)."""
    torch.manual_seed(seed)
    names = questions.label_names or ()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=SIZES["width"], num_hidden_layers=DEPTH, num_attention_heads=4,
        intermediate_size=2 * SIZES["width"], max_position_embeddings=tokenizer.model_max_length,
        pad_token_id=tokenizer.pad_token_id, id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    if trained:
        labels, listed = torch.tensor(questions.labels), texts.plain(questions)

        def loss(places: Tensor) -> Tensor:
            inputs = tokenizer([listed[place] for place in places], padding=True, return_tensors="pt")
            return model(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels[places]
            ).loss

        train(
            model, len(listed), loss, epochs=SIZES["epochs"], batch=32, learning_rate=1e-3, weight_decay=0.01,
            schedule=True, clip=True, seed=seed, name=f"training, seed {seed}",
        )  # fmt: skip
    return hf_stitch.load(model, processor=copy.deepcopy(tokenizer))


def accuracies(encoders: Mapping[str, Adapter], questions: Samples, test: Samples) -> dict[str, float]:
    """Return the accuracy of encoders, chance, and the most frequent class of the training questions."""
    labels = np.array(test.labels)
    answers = {name: logits(network, test).argmax(1).numpy() for name, network in encoders.items()}
    shares = {name: float((predicted == labels).mean()) for name, predicted in answers.items()}
    (frequent, _), *_ = collections.Counter(questions.labels or ()).most_common()
    shares["most frequent class"] = float((labels == frequent).mean())
    return shares | {"chance": 1 / len(questions.label_names or ())}


def audited(
    sources: Mapping[str, Adapter], target: Adapter, fitting: Samples, test: Samples, far: Samples
) -> list[dict[str, Any]]:
    """Stitch all layers of the sources into all layers of the target, and audit all stitches in one pass."""
    labels = {name: name for name in DIRECT} | {name: matcher.label for name, matcher in TASK_LOSS.items()}
    places, models = [], []
    for name, source in sources.items():
        matchers = ["lstsq"] if name == ITSELF else [*DIRECT, *TASK_LOSS.values()]
        options: dict[str, Any] = {"test_data": test, "matchers": matchers, "batch_size": 100, "resamples": 2}
        grid = hf_stitch.stitch_grid(source, target, fitting, **options)
        for i, j in itertools.product(range(DEPTH), repeat=2):
            for matcher, label in labels.items():
                if label in grid.matchers and (name != ITSELF or i == j):
                    places.append({"source": name, "from": i, "to": j, "matcher": matcher})
                    models.append(grid.stitched(source.layers[i], target.layers[j], label))
    audits = hf_stitch.audit(models, test, train_data=fitting, far_data=far, max_dose=MAX_DOSE, batch_size=100)
    return [{**place, **recorded(one)} for place, one in zip(places, audits, strict=True)]


def recorded(one: Audit) -> dict[str, Any]:
    """Convert the figures of an audit to JSON values, with infinite and undefined values as text."""
    doses = {name: [str(round(v, 3)) for v in (s.value, s.low, s.high)] for name, s in one.doses.items()}
    accuracy = one.evaluation["relative_accuracy"]
    return {
        "relative_accuracy": [round(v, 4) for v in (accuracy.value, accuracy.low, accuracy.high)],
        "residual": round(one.residual["body"], 4), "doses": doses, "left_out": dict(one.left_out),
        "accurate": bool(one.is_accurate), "in_distribution": one.in_distribution, "verdict": one.verdict,
        "controls": {
            name: {control: round(float(values[0, 0]), 3) for control, values in detection.controls.items()}
            for name, detection in one.detections["body"].items()
        },
    }  # fmt: skip


(CARRIES_OVER,) = study.stated(__file__)


def page(record: Mapping[str, Any]) -> str:
    audits, accuracy, preset = record["audits"], record["accuracy"], record["preset"]
    detectors = sorted({name for one in audits for name in one["controls"]}, reverse=True)
    tables = "\n".join(
        _table(record["layers"], _of(audits, source, matcher), f"{source}, {matcher}", detectors)
        for source in (TRAINED, UNTRAINED) for matcher in (*DIRECT, TASK, GENTLE)
    )  # fmt: skip
    return study.filled(
        __file__, claims(record), "--data-dir DATA --out OUT", **{key: preset[key] for key in SIZES}, far_least=FAR,
        gentle=SLOW, layers=len(record["layers"]),
        accuracy=study.markdown(["", "accuracy on test"], [[name, f"{v:.3f}"] for name, v in accuracy.items()]),
        detectors=", ".join(f"`{name}`" for name in detectors), max_dose=MAX_DOSE, caveats=caveats(audits),
        counted=study.markdown(COUNTED, _counted(audits)), controls=_controls(audits, detectors), tables=tables,
        seconds=record["seconds"],
    )  # fmt: skip


def _of(audits: Iterable[Mapping[str, Any]], source: str, matcher: str) -> list[Mapping[str, Any]]:
    return [one for one in audits if (one["source"], one["matcher"]) == (source, matcher)]


def decided(audits: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Count the accurate stitches in distribution and out of distribution."""
    verdicts = [one["in_distribution"] for one in audits if one["accurate"]]
    return verdicts.count(True), verdicts.count(False)


def claims(record: Mapping[str, Any]) -> list[dict[str, str]]:
    accuracy, audits = record["accuracy"], record["audits"]
    failed = [name for name in ("source", "target") if accuracy[name] <= accuracy["most frequent class"]]
    failed += [f"itself at layer {one['from']}" for one in audits if one["source"] == ITSELF and not _sound(one)]
    direct = [one for one in audits if one["matcher"] in DIRECT and one["source"] != ITSELF]
    strange = [
        one for one in audits if one["matcher"] == TASK and (one["source"] == UNTRAINED or _layer_distance(one) >= 2)
    ]
    (inside, left), (within, outside) = decided(direct), decided(strange)
    parts = [
        None if failed or yes + no < LEAST else yes / (yes + no) >= share
        for yes, no, share in ((inside, left, IN_DISTRIBUTION), (outside, within, OUT_OF_DISTRIBUTION))
    ]
    ours = f"direct: {inside} of {inside + left} in distribution; task loss: {outside} of {outside + within} out of it"
    if failed:
        ours += f"; a control fails ({', '.join(failed)})"
    return [CARRIES_OVER.row(ours, f"1 pair of encoders, {len(audits)} stitches", parts, 1)]


def _layer_distance(one: Mapping[str, Any]) -> int:
    return int(abs(one["from"] - one["to"]))


def caveats(audits: Sequence[Mapping[str, Any]]) -> str:

    def accurate(matcher: str) -> str:
        distant = [one for one in _of(audits, TRAINED, matcher) if _layer_distance(one) >= 2]
        return f"{sum(one['accurate'] for one in distant)} of {len(distant)}"

    twin = [one for one in audits if one["source"] == UNTRAINED]
    best = max(twin, key=lambda one: one["relative_accuracy"][0])
    unknown = sum(one["accurate"] and one["in_distribution"] is None for one in audits)
    return study.text(__file__, "caveats").format(
        fine=sum(one["accurate"] for one in audits), unknown=unknown, direct=accurate(DIRECT[0]), task=accurate(TASK),
        fine_of_twin=sum(one["accurate"] for one in twin), of_twin=len(twin), best=best,
    )  # fmt: skip


def _sound(one: Mapping[str, Any]) -> bool:
    return bool(one["accurate"] and one["in_distribution"])


COUNTED = (
    "source", "layers", "matcher", "stitches", "accurate", "of these in / out / undecided", "mean relative accuracy",
    "median residual",
)  # fmt: skip
DISTANCES = {"corresponding": (0, 0), "adjacent": (1, 1), "distant": (2, 99)}


def _counted(audits: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    lines: list[list[Any]] = []
    for source, (kind, bounds), matcher in itertools.product(
        (TRAINED, UNTRAINED), DISTANCES.items(), (*DIRECT, TASK, GENTLE)
    ):
        stitches = [one for one in _of(audits, source, matcher) if bounds[0] <= _layer_distance(one) <= bounds[1]]
        if stitches:
            fine, (inside, outside) = sum(one["accurate"] for one in stitches), decided(stitches)
            lines.append([
                source, kind, matcher, len(stitches), fine, f"{inside} / {outside} / {fine - inside - outside}",
                f"{np.mean([one['relative_accuracy'][0] for one in stitches]):.3f}",
                f"{np.median([one['residual'] for one in stitches]):.2f}",
            ])  # fmt: skip
    return lines


def _controls(audits: Sequence[Mapping[str, Any]], detectors: Sequence[str]) -> str:
    controls = [one for one in audits if one["source"] == ITSELF]
    kinds = ("halves", "train", "far")
    lines = [
        [name, *(" / ".join(f"{one['controls'][name][kind]:.2f}" for kind in kinds) for one in controls)]
        for name in detectors
    ]
    header = ["detector", *(f"layer {one['to']}" for one in controls)]
    passed = (f"`{name}` at {sum(name in one['doses'] for one in controls)}" for name in detectors)
    return study.text(__file__, "controls").format(
        sound=sum(map(_sound, controls)), layers=len(controls), passed=", ".join(passed),
        table=study.markdown(header, lines),
    )  # fmt: skip


def _table(layers: Sequence[str], audits: Sequence[Mapping[str, Any]], title: str, detectors: Sequence[str]) -> str:
    lines = [[f"**{layer}**", *("" for _ in layers)] for layer in layers]
    for one in audits:
        by_name = one["doses"]
        doses = ", ".join(f"{float(by_name[name][0]):.2f}" if name in by_name else "–" for name in detectors)
        where = {True: "in", False: "out", None: "?"}[one["in_distribution"]]
        lines[one["from"]][one["to"] + 1] = f"{one['relative_accuracy'][0]:.2f} · {doses} · {where}"
    return f"{study.markdown([title, *layers], lines)}\n"
