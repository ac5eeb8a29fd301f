"""Are stitches of text encoders accurate, and does the target know their activations?

Beyond Balogh & Jelasity 2025, who stitch image classifiers only. Here two small BERTs classify the questions of TREC;
they differ in their seed. Every layer of one, and of its untrained twin, is stitched into every layer of the other by
least squares, by least squares that keep the covariance, and by task loss. All stitches are audited together.

The rule, :data:`CARRIES_OVER`, was fixed before any figure was seen. After the first figures, and outside the rule: a
gentler task loss, to see whether the step size makes stitches strange.

    python -m how_not_to_stitch.text_audit --data-dir DATA --out OUT
"""

import collections
import copy
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import study
import torch
from how_not_to_stitch.experiment import question
from relative_representations import text_encoders, texts
from relative_representations.training import train
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

import hf_stitch
from hf_stitch.analysis import Audit
from hf_stitch.training import TaskLoss

DIRECT = ("lstsq", "recoloured")
TASK, GENTLE = "task loss", "gentle task loss"
TRAINED, UNTRAINED, ITSELF = "other seed", "untrained twin", "itself"
"""Sources of the stitches; the last is a control."""
MAX_DOSE = 0.2
"""Dose up to which an audit counts activations as in distribution, its default."""
IN_DISTRIBUTION, OUT_OF_DISTRIBUTION, LEAST = 0.8, 0.5, 5
"""Shares and the least number of stitches of the rule."""


@dataclass(frozen=True)
class Preset:
    """Sizes of the experiment.

    Attributes:
        train: Questions on which the encoders are trained.
        test: Questions of all scores.
        known: Training questions to which stitches and detectors are fitted.
        far: Spanish sentences.
        layers: Layers of an encoder.
        width: Width of an encoder.
        vocabulary: Number of tokens.
        epochs: Epochs of training.
        steps: Steps of task-loss matching.
    """

    train: int
    test: int
    known: int
    far: int
    layers: int
    width: int
    vocabulary: int
    epochs: int
    steps: int

    @property
    def task_loss(self) -> dict[str, TaskLoss]:
        """Task-loss matching: hard labels, from least squares, batches of 32. Gentle: fewer and smaller steps."""
        options: dict[str, Any] = {"labels": "hard", "batch_size": 32, "schedule": "constant"}
        return {
            TASK: TaskLoss(**options, max_steps=self.steps, lr=3e-3),
            GENTLE: TaskLoss(**options, max_steps=max(self.steps // 3, 1), lr=1e-3),
        }


PRESETS = {
    "small": Preset(5452, 500, 1500, 300, 4, 64, 2000, 8, 300),
    "paper": Preset(5452, 500, 5452, 2000, 12, 256, 4000, 20, 5000),
    "test": Preset(150, 60, 150, 60, 2, 16, 400, 1, 2),
}


def main() -> None:
    """Run the experiment from the command line."""
    arguments = study.parser(__doc__, "data-dir", presets=PRESETS).parse_args()
    preset, start = PRESETS[arguments.preset], time.perf_counter()
    questions, test = (
        texts.trec(split, count, arguments.data_dir)
        for split, count in (("train", preset.train), ("test", preset.test))
    )
    far = texts.read(texts.TATOEBA, "test", preset.far, arguments.data_dir, text="es", id="id")
    tokenizer = text_encoders.trained_tokenizer(
        text_encoders.Recipe("roberta", epochs=0, vocabulary=preset.vocabulary), texts.plain(questions)
    )
    target, source = (encoder(seed, tokenizer, questions, preset) for seed in (1, 0))
    twin = encoder(0, tokenizer, questions, preset, trained=False)
    known = questions.take(preset.known)
    record = {
        "preset": {"name": arguments.preset, **asdict(preset)},
        "accuracy": accuracies({"source": source, "target": target, "untrained twin": twin}, questions, test),
        "layers": [layer.rpartition(".")[2] for layer in target.layers],
        "audits": audited({TRAINED: source, UNTRAINED: twin, ITSELF: target}, target, known, test, far, preset),
        "seconds": round(time.perf_counter() - start),
    }  # fmt: skip
    study.leave("text_audit", record, page, {}, arguments.out)


def encoder(
    seed: int, tokenizer: PreTrainedTokenizerFast, questions: hf_stitch.Samples, preset: Preset, *, trained: bool = True
) -> hf_stitch.Adapter:
    """Make a BERT from its config, and train it on the classes of the questions. Without training: its twin."""
    torch.manual_seed(seed)
    names = questions.label_names or ()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=preset.width, num_hidden_layers=preset.layers, num_attention_heads=4,
        intermediate_size=2 * preset.width, max_position_embeddings=tokenizer.model_max_length,
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
            model, len(listed), loss, epochs=preset.epochs, batch=32, learning_rate=1e-3, weight_decay=0.01,
            schedule=True, clip=1.0, seed=seed, name=f"training, seed {seed}",
        )  # fmt: skip
    return hf_stitch.load(model, processor=copy.deepcopy(tokenizer))


def accuracies(
    encoders: Mapping[str, hf_stitch.Adapter], questions: hf_stitch.Samples, test: hf_stitch.Samples
) -> dict[str, float]:
    """Return the accuracy of encoders, of chance, and of the most frequent class of the training questions."""
    labels = np.array(test.labels)
    found = {}
    for name, network in encoders.items():
        with torch.no_grad():
            parts = [network.forward(network.preprocess(batch.samples)).logits for batch in test.batches(100)]
        found[name] = float((torch.cat(parts).argmax(1).numpy() == labels).mean())
    (frequent, _), *_ = collections.Counter(questions.labels or ()).most_common()
    found["most frequent class"] = float((labels == frequent).mean())
    return found | {"chance": 1 / len(questions.label_names or ())}


def audited(
    sources: Mapping[str, hf_stitch.Adapter],
    target: hf_stitch.Adapter,
    known: hf_stitch.Samples,
    test: hf_stitch.Samples,
    far: hf_stitch.Samples,
    preset: Preset,
) -> list[dict[str, Any]]:
    """Stitch all layers of the sources into all layers of the target, and audit all stitches in one pass.

    Returns:
        One record per stitch: ``source``, ``from`` and ``to`` (numbers of layers), ``matcher``, and what
        :func:`recorded` adds.
    """
    trained = preset.task_loss
    labels = {**{name: name for name in DIRECT}, **{name: matcher.label for name, matcher in trained.items()}}
    places, models = [], []
    for name, source in sources.items():
        matchers = ["lstsq"] if name == ITSELF else [*DIRECT, *trained.values()]
        grid = hf_stitch.stitch_grid(
            source, target, known, test_data=test, matchers=matchers, batch_size=100, resamples=2
        )
        for i, j in itertools.product(range(preset.layers), repeat=2):
            for matcher, label in labels.items():
                if label in grid.matchers and (name != ITSELF or i == j):
                    places.append({"source": name, "from": i, "to": j, "matcher": matcher})
                    models.append(grid.stitched(source.layers[i], target.layers[j], label))
    audits = hf_stitch.audit(models, test, train_data=known, far_data=far, max_dose=MAX_DOSE, batch_size=100)
    return [{**place, **recorded(one)} for place, one in zip(places, audits, strict=True)]


def recorded(one: Audit) -> dict[str, Any]:
    """Return the figures of an audit as JSON values; infinite and undefined ones as text."""
    doses = {name: [str(round(v, 3)) for v in (s.value, s.low, s.high)] for name, s in one.doses.items()}
    accuracy = one.evaluation["relative_accuracy"]
    return {
        "relative_accuracy": [round(v, 4) for v in (accuracy.value, accuracy.low, accuracy.high)],
        "residual": round(one.residual["body"], 4), "doses": doses, "left_out": dict(one.left_out),
        "accurate": bool(one.is_accurate), "in_distribution": one.in_distribution, "verdict": one.verdict,
        "controls": {
            name: {control: round(float(values[0, 0]), 3) for control, values in found.controls.items()}
            for name, found in one.detections["body"].items()
        },
    }  # fmt: skip


CARRIES_OVER = question(
    "after paper 4, section 4.2", "The claims carry over to text: task-loss stitches are strange, direct ones are not",
    "–",
    f"of accurate stitches whose audit decides, at least {IN_DISTRIBUTION:.0%} of the direct ones are in distribution, "
    f"and at least {OUT_OF_DISTRIBUTION:.0%} of the task-loss ones between layers two or more apart, or from the "
    f"untrained twin, are out of it; fewer than {LEAST}, or a control that fails: undecided",
)  # fmt: skip
PAGE = """# Audits of stitched text encoders (beyond Balogh & Jelasity, AAAI 2025)

**What to do**: train a stitch with small steps, and few, where direct matching is not enough: on one pair of encoders,
gentle task loss between corresponding and adjacent layers stays in distribution, and larger steps leave it.

{claims}

The paper has images only. Its claim, carried over to text: stitches that are trained on the task are accurate between
distant layers because the target gets activations that it never has; direct matches that are accurate do not do that.

Two BERTs from configs, no pretraining: {layers} layers of width {width}, own byte-level vocabulary of {vocabulary}
tokens, trained for {epochs} epochs on the {train} questions of TREC (six coarse classes; this copy has no quote
marks), with two seeds. Stitches and detectors are fitted to {known} of these questions, one map for all positions;
task loss: {steps} steps of 32 questions (hard labels, Adam 3e-3, from least squares; *gentle*: {gentle} steps of 1e-3,
added after the first figures and outside the rule). All scores are those of
{test} test questions. Far data, as a control of the detectors: {far} Spanish sentences (Tatoeba). The
*untrained twin* has the initial weights of the source.

{accuracy}

The audit: *accurate* from .8 of the target's accuracy, above chance and the mean activation; *dose*: the relative
residual of noise, with the covariance of the target's activations, that is as easy to tell as the stitched ones, for the
detectors {detectors}; *in distribution* up to {max_dose}, *out* above, undecided (?) where an interval contains it.

The rule was fixed before any figure was seen; that one pair of encoders decides nothing, later. Controls: encoders
above the most frequent class, and the target stitched into itself at the same layers accurate and in distribution.

{caveats}

{counted}

{controls}

## Every stitch

Relative accuracy, doses ({detectors}; a dash: the detector does not count there), and in or out of distribution.
Rows: layer of the source; columns: layer of the target.

{tables}
This page and [its figures as JSON](text_audit.json) are written by the command (one CPU core, {seconds} s):

```
python -m how_not_to_stitch.text_audit --data-dir DATA --out OUT
```
"""  # noqa: E501


def page(record: Mapping[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    audits, accuracy = record["audits"], record["accuracy"]
    detectors = _detectors(audits)
    tables = "\n".join(
        _table(record["layers"], _of(audits, source, matcher), f"{source}, {matcher}", detectors)
        for source in (TRAINED, UNTRAINED) for matcher in (*DIRECT, TASK, GENTLE)
    )  # fmt: skip
    return PAGE.format(
        **{key: value for key, value in record["preset"].items() if key not in ("name", "layers")},
        gentle=max(record["preset"]["steps"] // 3, 1), layers=len(record["layers"]),
        claims=study.verdicts(claims(record)),
        accuracy=study.markdown(["", "accuracy on test"], [[name, f"{v:.3f}"] for name, v in accuracy.items()]),
        detectors=", ".join(f"`{name}`" for name in detectors), max_dose=MAX_DOSE,
        caveats=caveats(audits), counted=study.markdown(COUNTED, _counted(audits)),
        controls=_controls(audits, detectors), tables=tables, seconds=record["seconds"],
    )  # fmt: skip


def _of(audits: Sequence[Mapping[str, Any]], source: str, matcher: str) -> list[Mapping[str, Any]]:
    return [one for one in audits if (one["source"], one["matcher"]) == (source, matcher)]


def _detectors(audits: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({name for one in audits for name in (*one["doses"], *one["left_out"])}, reverse=True)


def decided(audits: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return how many accurate stitches are in distribution, and how many are out of it."""
    found = [one["in_distribution"] for one in audits if one["accurate"]]
    return found.count(True), found.count(False)


def claims(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the row of the table of all experiments."""
    accuracy, audits = record["accuracy"], record["audits"]
    failed = [name for name in ("source", "target") if accuracy[name] <= accuracy["most frequent class"]]
    failed += [f"itself at layer {one['from']}" for one in audits if one["source"] == ITSELF and not _sound(one)]
    direct = [one for one in audits if one["matcher"] in DIRECT and one["source"] != ITSELF]
    strange = [
        one for one in audits
        if one["matcher"] == TASK and (one["source"] == UNTRAINED or abs(one["from"] - one["to"]) >= 2)
    ]  # fmt: skip
    (inside, left), (within, outside) = decided(direct), decided(strange)
    parts = [
        None if failed or yes + no < LEAST else yes / (yes + no) >= share
        for yes, no, share in ((inside, left, IN_DISTRIBUTION), (outside, within, OUT_OF_DISTRIBUTION))
    ]
    ours = f"direct: {inside} of {inside + left} in distribution; task loss: {outside} of {outside + within} out of it"
    if failed:
        ours += f"; a control fails ({', '.join(failed)})"
    return [CARRIES_OVER.row(ours, f"1 pair of encoders, {len(audits)} stitches", parts, 1)]


def caveats(audits: Sequence[Mapping[str, Any]]) -> str:
    """Return what limits the verdict, whichever it is."""

    def cells(matcher: str, apart: bool) -> list[Mapping[str, Any]]:
        return [one for one in _of(audits, TRAINED, matcher) if (abs(one["from"] - one["to"]) >= 2) == apart]

    def accurate(matcher: str) -> str:
        found = cells(matcher, apart=True)
        return f"{sum(one['accurate'] for one in found)} of {len(found)}"

    def strange(matcher: str, apart: bool) -> str:
        found = [one for one in cells(matcher, apart) if one["accurate"]]
        return f"{sum(one['in_distribution'] is False for one in found)} of {len(found)}"

    twin = [one for one in audits if one["source"] == UNTRAINED]
    best = max(twin, key=lambda one: one["relative_accuracy"][0])
    lines = [
        f"Between distant layers of the two encoders, {accurate(DIRECT[0])} least-squares stitches are accurate, and "
        f"{accurate(TASK)} by task loss: only where the first are not does task loss show a similarity that direct "
        "matching does not.",
        f"Of the accurate task-loss stitches between corresponding and adjacent layers, {strange(TASK, False)} are out "
        f"of distribution, and {strange(TASK, True)} of those between distant ones. Gentle: "
        f"{strange(GENTLE, False)} and {strange(GENTLE, True)}. Where both shares are alike, strangeness does not tell "
        "distant layers from corresponding ones; where gentle training has lower ones, the size of the steps, and not "
        "the layers alone, makes stitches strange.",
        f"From the untrained twin, {sum(one['accurate'] for one in twin)} of {len(twin)} stitches are accurate; the "
        f"most accurate one ({best['matcher']}) reaches {best['relative_accuracy'][0]:.2f}.",
    ]
    return "What limits the verdict:\n\n" + "\n".join(f"- {line}" for line in lines)


def _sound(one: Mapping[str, Any]) -> bool:
    return bool(one["accurate"] and one["in_distribution"])


COUNTED = (
    "source", "layers", "matcher", "stitches", "accurate", "of these in / out / undecided", "mean relative accuracy",
    "median residual", "median of the largest dose",
)  # fmt: skip


def _counted(audits: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the lines of the table of counts."""
    lines = []
    for source, (kind, apart), matcher in itertools.product(
        (TRAINED, UNTRAINED),
        (("corresponding", (0, 0)), ("adjacent", (1, 1)), ("distant", (2, 99))),
        (*DIRECT, TASK, GENTLE),
    ):
        found = [one for one in _of(audits, source, matcher) if apart[0] <= abs(one["from"] - one["to"]) <= apart[1]]
        if not found:
            continue
        fine = [one for one in found if one["accurate"]]
        inside, outside = decided(found)
        doses = [max((float(dose[0]) for dose in one["doses"].values()), default=float("nan")) for one in found]
        lines.append([
            source, kind, matcher, str(len(found)), str(len(fine)),
            f"{inside} / {outside} / {len(fine) - inside - outside}",
            f"{np.mean([one['relative_accuracy'][0] for one in found]):.3f}",
            f"{np.median([one['residual'] for one in found]):.2f}", f"{np.median(doses):.2f}",
        ])  # fmt: skip
    return lines


def _controls(audits: Sequence[Mapping[str, Any]], detectors: Sequence[str]) -> str:
    controls = [one for one in audits if one["source"] == ITSELF]
    kinds = ("halves", "train", "far")
    lines = [
        [name, *(" / ".join(f"{one['controls'][name][kind]:.2f}" for kind in kinds) for one in controls)]
        for name in detectors
    ]
    table = study.markdown(["detector", *(f"layer {one['to']}" for one in controls)], lines)
    uncounted: collections.Counter[str] = collections.Counter()
    for one in audits:
        if one["source"] != ITSELF:
            uncounted.update(f"`{name}` {why}" for name, why in one["left_out"].items())
    silent = "; ".join(f"{what} at {count} of the stitches" for what, count in uncounted.items())
    return (
        f"Controls: the target stitched into itself by least squares is accurate and in distribution at "
        f"{sum(map(_sound, controls))} of {len(controls)} layers. "
        + (f"Detectors that do not count: {silent}." if silent else f"{len(detectors)} detectors count at all layers.")
        + f" AUROC of two halves of the test questions / test v. training questions / Spanish sentences:\n\n{table}"
    )


def _table(layers: Sequence[str], audits: Sequence[Mapping[str, Any]], title: str, detectors: Sequence[str]) -> str:
    lines = [[f"**{layer}**", *("" for _ in layers)] for layer in layers]
    for one in audits:
        known = one["doses"]
        doses = ", ".join(f"{float(known[name][0]):.2f}" if name in known else "–" for name in detectors)
        where = {True: "in", False: "out", None: "?"}[one["in_distribution"]]
        lines[one["from"]][one["to"] + 1] = f"{one['relative_accuracy'][0]:.2f} · {doses} · {where}"
    return f"{study.markdown([title, *layers], lines)}\n"


if __name__ == "__main__":
    main()
