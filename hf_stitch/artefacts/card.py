"""Model card of a stitcher or stitched model: description, usage, recipe, and scores compared with baselines."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CardData, ModelCard, ModelCardData, RepoCard

from hf_stitch.artefacts.description import Description
from hf_stitch.artefacts.record import CHANGED, SIDES
from hf_stitch.data.overlap import samples_text
from hf_stitch.papers import CSISZARIK_2021, LENC_2015, Paper
from hf_stitch.printing import visible, warn
from hf_stitch.reference import ModelReference
from hf_stitch.registry import PluginError, registries

TEMPLATE = Path(__file__).with_name("card.md.jinja")
BEGIN = "<!-- hf-stitch: from here to the end mark is rewritten at every save and push; add text above or below -->"
END = "<!-- hf-stitch: end mark -->"
GENERATED = re.compile(r"<!-- hf-stitch: from here.*?-->.*?<!-- hf-stitch: end mark -->", re.DOTALL)
ON_HUB = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")

STITCHING = (LENC_2015, CSISZARIK_2021)
"""Papers that introduced stitching."""

PICTURES = {
    "stitch.png": "Both networks as strips: layers that run, layers that are left out, and the stitch",
    "scores.png": "Scores of the stitched model and its baselines, with confidence intervals",
}
"""Figures next to a card, with their alternative texts."""

REPORT = "report.html"
"""Evaluation report next to a card."""

OURS = ("library_name", "base_model", "base_model_relation", "pipeline_tag")
"""Metadata keys written at every save; generated entries of ``tags`` and ``model-index`` are replaced as well."""

PREDICTORS = ("stitched", "identity", "mean_only", "source", "target", "chance")
TAGS = ("hf_stitch", "model-stitching", "stitcher", "stitched-model")
HELD_OUT_TYPE = "held-out"  # dataset type of the generated entries in the model index
LIST_KEYS = ("tags", "model-index")
SAMPLES = {
    "image": ("from PIL import Image\n", 'Image.new("RGB", (224, 224))  # your image'),
    "text": ("", '"Your text."'),
    "": ("", "your_sample"),
}


def card(
    description: Description, *, name: str | None = None, present: str | None = None, tags: Iterable[str] = (),
    sample: str | None = None, pictures: Collection[str] = (),
) -> str:  # fmt: skip
    """Return the model card of a stitcher or stitched model.

    Manual additions to the ``present`` card are kept: text before and after the marks, other metadata and tags.
    """
    description, old_card = plain(description), None if present is None else _read(present)
    manual = {} if old_card is None else _manual_metadata(old_card)
    matcher = description.recipe.get("matcher") or {}
    metadata = _metadata(description, name, [*tags, *([str(matcher["name"])] if "name" in matcher else [])])
    audit = description.recipe.get("audit") or description.scores.get("audit") or ""
    task = registries.tasks.build(str(description.task)) if description.task in registries.tasks else None
    conflicts = _conflicts(description, plain(manual.get("license")))
    for conflict in conflicts:
        warn(f"{conflict}: see the card")
    new_card = ModelCard.from_template(
        ModelCardData(**metadata),
        template_path=str(TEMPLATE),
        title=name.split("/")[-1] if name else "Stitched model" if description.whole else "Stitcher",
        begin=BEGIN,
        end=END,
        about=description,
        source=_link(description.source),
        target=_link(description.target),
        kind=_map_title(description.body),
        unnamed=[side for side in SIDES if getattr(description, side).public.id is None],
        headline=_headline(description.scores),
        pictures=[(name, text) for name, text in PICTURES.items() if name in pictures],
        report=REPORT if REPORT in pictures else "",
        audit=str(audit.get("verdict", "") if isinstance(audit, Mapping) else audit),
        place=name or "path/to/this/folder",
        sample=("import torch\n", sample) if sample else SAMPLES[_modality(description)],
        causal=task is not None and task.causal,
        usage="" if task is None else task.usage(),
        recipe=recipe_rows(description),
        conflicts=conflicts,
        papers=[(paper.title, paper.url) for paper in _papers(description)],
        **_scores(description.scores),
    )
    if old_card is None:
        return str(new_card)
    generated = GENERATED.search(str(new_card))
    assert generated is not None
    text = f"{old_card.text.rstrip()}\n\n{generated[0]}\n"
    if GENERATED.search(old_card.text):  # a function as replacement, because a string could contain escapes
        text = GENERATED.sub(lambda _: generated[0], old_card.text, count=1)
    return _assemble(_merge_metadata(manual, new_card.data.to_dict()), text)


def summary(description: Description) -> str:
    """Return a short text about an artefact: networks, cut layers, stitch, task and scores."""
    description = plain(description)
    kind = "stitched model" if description.whole else "stitcher"
    (width_in, width_out), matcher = description.widths, description.recipe.get("matcher") or {}
    rows = {
        "source": f"{description.source}, up to {description.source_layer}",
        "target": f"{description.target}, after {description.target_layer}",
        "stitch": f"{description.body.get('name')}, {width_in} → {width_out}"
        + (f"; matcher {matcher['name']}" if "name" in matcher else ""),
        "scores": _headline(description.scores).replace("**", ""),
    }
    title = kind + (f" for {description.task}" if description.task else "")
    return "\n".join([title, *(f"{name}  {text}" for name, text in rows.items() if text)])


def merge_cards(there: str | None, here: str | None) -> str | None:
    """Merge the cards of an artefact on the Hub and in a folder, as input for :func:`card`.

    If both cards contain manual additions, the text of the folder is kept and a warning is issued.
    """
    if there is None or here is None:
        return there if here is None else here
    cards = _read(there), _read(here)
    texts = [GENERATED.sub("", card.text).strip() for card in cards]
    added = [re.sub(r"\A# .*", "", text).strip() for text in texts]  # without the title
    if added[0] and added[1] and added[0] != added[1]:
        warn(
            "the text of the local card replaces text that was added to the card on the Hub; earlier commits still "
            "contain the replaced text"
        )
    return _assemble(_merge_metadata(*map(_manual_metadata, cards)), cards[1 if added[1] else 0].text)


def _read(text: str) -> RepoCard:
    # RepoCard, because ModelCard would merge the results of all models in the model index into one.
    try:
        return RepoCard(text)
    except Exception as error:
        raise ValueError(f"the metadata of the existing card cannot be read ({error}); repair it first") from error


def _assemble(metadata: Mapping[str, Any], text: str) -> str:
    return f"---\n{CardData(**metadata).to_yaml()}\n---\n{text}"


def _manual_metadata(card: RepoCard) -> dict[str, Any]:
    """Return the metadata added by hand; for a card without marks, all metadata."""
    data: dict[str, Any] = card.data.to_dict()
    if (generated := GENERATED.search(card.text)) is None:
        return data
    generated_tags = {*TAGS, *re.findall(r"^\| matcher \| `(.*)` \|$", generated[0], re.MULTILINE)}
    manual: dict[str, Any] = {key: field for key, field in data.items() if key not in OURS}
    manual["tags"] = [tag for tag in data.get("tags") or () if tag not in generated_tags]
    manual["model-index"] = [
        entry for entry in data.get("model-index") or ()
        if any((result.get("dataset") or {}).get("type") != HELD_OUT_TYPE for result in entry.get("results") or [{}])
    ]  # fmt: skip
    return {key: field for key, field in manual.items() if field or key not in LIST_KEYS}


def _merge_metadata(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge metadata: tags of both cards, results of both (second card first), and otherwise the second card's."""
    tags = dict.fromkeys([*(first.get("tags") or ()), *(second.get("tags") or ())])
    results = [*(second.get("model-index") or ()), *(first.get("model-index") or ())]
    merged = {**first, **second, "tags": [*tags], "model-index": results}
    return {key: field for key, field in merged.items() if field or key not in LIST_KEYS}


def _conflicts(description: Description, licence: Any) -> list[str]:
    """Return why the networks' licences forbid sharing the stitched model under ``licence``."""
    conflicts, model_terms = [], _terms(licence)
    for side in SIDES if description.whole else ():
        parent = getattr(description, side).license
        subject, terms = f"the licence of the {side}, {parent}, ", _terms(parent)
        if "nd" in terms:
            conflicts.append(f"{subject}does not allow derivatives, but this model contains a part of its weights")
        elif licence and "nc" in terms and "nc" not in model_terms:
            conflicts.append(
                f"{subject}does not allow commercial use, but the licence of this model, {licence}, does not exclude it"
            )
        elif licence and "sa" in terms and parent != licence:
            conflicts.append(f"{subject}requires the same licence, but this model has {licence}")
    return conflicts


def _terms(licence: Any) -> set[str]:
    """Return the parts of a licence's name; nc, nd and sa are terms, and sa is added for GPL licences."""
    parts = set(str(licence or "").lower().split("-"))
    return parts | ({"sa"} if parts & {"gpl", "agpl", "lgpl"} else set())


def _metadata(description: Description, name: str | None, tags: list[str]) -> dict[str, Any]:
    parents = [reference.id for reference in (description.source, description.target) if _on_hub(reference)]
    kind = TAGS[-1] if description.whole else TAGS[-2]
    metadata: dict[str, Any] = {"library_name": "hf_stitch", "tags": list(dict.fromkeys([*TAGS[:2], kind, *tags]))}
    if parents:
        metadata["base_model"] = list(dict.fromkeys(parents))
        metadata["base_model_relation"] = "merge" if description.whole else "adapter"
    if pipeline := description.pipeline:
        metadata["pipeline_tag"] = pipeline
    if results := _results(description.scores, description.pipeline):
        metadata["model-index"] = [{"name": name.split("/")[-1] if name else kind, "results": results}]
    return metadata


def _results(scores: Mapping[str, Any], pipeline: str) -> list[dict[str, Any]]:
    """Return the scores for the model index: all scores of the model, and the first score of each baseline."""
    entries = [
        {
            "type": metric,
            "value": round(score["value"], 6),
            "name": metric.replace("_", " ") + ("" if predictor == "stitched" else f" of the baseline: {predictor}"),
            "args": {"predictor": predictor},
        }
        for predictor, by_metric in ordered(scores).items()
        for number, (metric, score) in enumerate(by_metric.items())
        if (number == 0 or predictor == "stitched") and _finite(score["value"]) is not None
    ]
    if not entries:
        return []
    dataset = {"type": HELD_OUT_TYPE, "name": _scored_samples_text(scores), "args": {"fingerprint": scores["data"]}}
    return [{"task": {"type": pipeline or scores["task"]}, "dataset": dataset, "metrics": entries}]


def _papers(description: Description) -> list[Paper]:
    """Return the papers on stitching and on the matcher, or on the map if no matcher is recorded."""
    matcher = (description.recipe.get("matcher") or {}).get("name")
    kind, name = ("matchers", matcher) if matcher else ("stitches", description.body.get("name"))
    method = _method_class(kind, str(name))
    return list(dict.fromkeys((*STITCHING, *getattr(method, "papers", ()))))


def _method_class(kind: str, name: str) -> Any:
    try:
        return registries[kind].get(name) if name in registries[kind] else None
    except PluginError:
        return None


def _map_title(body: Mapping[str, Any]) -> str:
    stitch_class = _method_class("stitches", str(body.get("name")))
    return f"a `{body.get('name')}` map" if stitch_class is None else str(stitch_class.title).rstrip(",")


def _headline(scores: Mapping[str, Any]) -> str:
    table = ordered(scores)
    if not table.get("stitched"):
        return ""
    metric = next(iter(table["stitched"]))
    stitched, higher_is_better = table["stitched"][metric], _higher_is_better(scores).get(metric, True)
    baselines = {name: row[metric] for name, row in table.items() if name != "stitched" and metric in row}
    labels = {"identity": "no map", "mean_only": "mean only", "source": "source alone", "target": "target alone"}
    comparison = ", ".join(f"{labels.get(name, name)} {_score_text(score, False)}" for name, score in baselines.items())
    rivals = [name for name in baselines if name not in SIDES]
    not_beaten = [labels.get(name, name) for name in rivals if not _beats(stitched, baselines[name], higher_is_better)]
    if {"source", "target"} <= baselines.keys() and not _beats(stitched, baselines["source"], higher_is_better):
        # Beating the target alone may only mean that the source is the better network.
        not_beaten += [labels["source"]] if _beats(stitched, baselines["target"], higher_is_better) else []
    warning = f" **It is not shown to be better than: {', '.join(not_beaten)}.**" if not_beaten else ""
    compared = f" (for comparison: {comparison})" if comparison else ""
    score = _score_text(stitched)
    return f"Its {metric.replace('_', ' ')} on {_scored_samples_text(scores)} is **{score}**{compared}.{warning}"


def _beats(score: Mapping[str, Any], baseline: Mapping[str, Any], higher_is_better: bool) -> bool:
    """Return whether the whole confidence interval of a score is better than a baseline."""
    low, high, reference = _finite(score["low"]), _finite(score["high"]), _finite(baseline["value"])
    if low is None or high is None or reference is None:
        return False
    return low > reference if higher_is_better else high < reference


def recipe_rows(description: Description) -> dict[str, str]:
    """Return the recipe of an artefact, name -> Markdown, without unknown entries."""
    recipe, body, (width_in, width_out) = description.recipe, description.body, description.widths
    matcher, samples = dict(recipe.get("matcher") or {}), recipe.get("samples")
    rows = {
        "source": f"{_link(description.source)}, cut after `{description.source_layer}`",
        "target": f"{_link(description.target)}, cut after `{description.target_layer}`",
        "source weights": f"`{description.source.weights_hash}`" if description.source.weights_hash else "",
        "target weights": f"`{description.target.weights_hash}`" if description.target.weights_hash else "",
        "source licence": f"`{description.source.license}`" if description.source.license else "",
        "target licence": f"`{description.target.license}`" if description.target.license else "",
        "matcher": f"`{matcher.pop('name')}`" if "name" in matcher else "",
        "matcher options": _pairs_text(matcher),
        "chosen by the error on held-out anchors": _pairs_text(recipe.get("held_out_errors") or {}),
        "stitching layer": f"`{body.get('name')}`, {width_in} → {width_out}; {_pairs_text(body.get('fitted') or {})}",
        "pooling": f"`{description.stitch['pooling']}`",
        "anchors" if "anchors" in recipe else "fitted on": f"{samples} samples" if samples else "",
        "data": f"`{recipe['data']}`" if "data" in recipe else "",
        "data of the target": f"`{recipe['paired_data']}`" if "paired_data" in recipe else "",
        "held out": _test_samples_text(recipe),
        "seed": str(recipe.get("seed", "")),
        "changed since the fit": "; ".join(map(str, recipe.get(CHANGED, ()))),
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(recipe.get("versions", {}).items())),
    }
    return {key: text for key, text in rows.items() if text}


def _test_samples_text(recipe: Mapping[str, Any]) -> str:
    if "test_data" in recipe:
        return f"separate samples, `{recipe['test_data']}`"
    size = recipe.get("test_size")
    return "" if size is None else f"{size:.0%} of the samples" if isinstance(size, float) else f"{size} samples"


def _scores(scores: Mapping[str, Any]) -> dict[str, Any]:
    table = ordered(scores)
    metrics = list(dict.fromkeys(metric for row in table.values() for metric in row))
    return {
        "metrics": [metric.replace("_", " ") for metric in metrics],
        "scored_on": f"On {_scored_samples_text(scores)} (`{scores['data']}`):" if table else "",
        "scores": {
            f"**{name}**" if name == "stitched" else name: [_score_text(row.get(metric)) for metric in metrics]
            for name, row in table.items()
        },
    }


def _scored_samples_text(scores: Mapping[str, Any]) -> str:
    share = scores.get("fitted_share")
    return samples_text(scores["n"], None if share is None else _finite(share))


def ordered(scores: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return predictor -> metric -> score in reading order, because a saved config is sorted by name."""

    def sort(values: Mapping[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
        return {key: values[key] for key in sorted(values, key=lambda k: first.index(k) if k in first else len(first))}

    metrics = tuple(_higher_is_better(scores))
    return {predictor: sort(row, metrics) for predictor, row in sort(scores.get("scores", {}), PREDICTORS).items()}


def _higher_is_better(scores: Mapping[str, Any]) -> Mapping[str, bool]:
    """Return metric -> whether higher is better, for the task of the scores; empty if the task is not installed."""
    name = str(scores.get("task"))
    return registries.tasks.get(name).figures if name in registries.tasks else {}


def _score_text(score: Mapping[str, Any] | None, interval: bool = True) -> str:
    """Format a score, e.g. ``0.913 [0.902, 0.923]``; a dash if it is undefined."""
    if score is None or (number := _finite(score["value"])) is None:
        return "–"
    low, high = _finite(score["low"]), _finite(score["high"])
    return f"{number:.3f}" + (f" [{low:.3f}, {high:.3f}]" if interval and low is not None and high is not None else "")


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _modality(description: Description) -> str:
    spec = description.stitch["source"]
    if (description.task or "").startswith("image") or spec["grid"]:
        return "image"
    return "text" if spec["layout"] == "bnd" else ""


def _on_hub(reference: ModelReference) -> bool:
    return reference.public.id is not None and bool(ON_HUB.fullmatch(reference.public.id))


def _link(reference: ModelReference) -> str:
    if not _on_hub(reference):
        if reference.public.id is not None:
            return f"`{reference.id}`"
        return "a network that is not on the Hub" + (f" ({reference.summary})" if reference.summary else "")
    tree = f"/tree/{reference.revision}" if reference.revision else ""
    revision = f" at `{reference.revision[:12]}`" if reference.revision else ""
    return f"[{reference.id}](https://huggingface.co/{reference.id}{tree}){revision}"


def _pairs_text(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} = {v:.6g}" if isinstance(v, float) else f"{k} = {v}" for k, v in sorted(values.items()))


def plain(value: Any) -> Any:
    r"""Remove Markdown, HTML and control characters from all texts of a record, because it may be untrusted."""
    if isinstance(value, (Description, ModelReference)):
        return replace(value, **{field.name: plain(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, Mapping):
        return {plain(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return re.sub(r"[\s`|<>\[\]*\\]+", " ", visible(value)).strip() if isinstance(value, str) else value
