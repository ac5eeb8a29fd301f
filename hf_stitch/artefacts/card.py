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
from hf_stitch.data.overlap import held_out
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
HELD_OUT = "held-out"
LISTS = ("tags", "model-index")
SAMPLES = {
    "image": ("from PIL import Image\n", 'Image.new("RGB", (224, 224))  # your image'),
    "text": ("", '"Your text."'),
    "": ("", "your_sample"),
}


def card(
    described: Description, *, name: str | None = None, present: str | None = None, tags: Iterable[str] = (),
    sample: str | None = None, figures: Collection[str] = (),
) -> str:  # fmt: skip
    """Return the model card of a stitcher or stitched model.

    Manual additions to the ``present`` card are kept: text before and after the marks, other metadata and tags.
    """
    described, old_card = plain(described), None if present is None else _read(present)
    manual = {} if old_card is None else _manual_metadata(old_card)
    matcher = described.recipe.get("matcher") or {}
    metadata = _metadata(described, name, [*tags, *([str(matcher["name"])] if "name" in matcher else [])])
    audit = described.recipe.get("audit") or described.scores.get("audit") or ""
    task = registries.tasks.build(str(described.task)) if described.task in registries.tasks else None
    conflicts = _conflicts(described, plain(manual.get("license")))
    for conflict in conflicts:
        warn(f"{conflict}: see the card")
    new_card = ModelCard.from_template(
        ModelCardData(**metadata),
        template_path=str(TEMPLATE),
        title=name.split("/")[-1] if name else "Stitched model" if described.whole else "Stitcher",
        begin=BEGIN,
        end=END,
        about=described,
        source=_linked(described.source),
        target=_linked(described.target),
        kind=_kind(described.body),
        unnamed=[side for side in SIDES if getattr(described, side).public.id is None],
        headline=_headline(described.scores),
        pictures=[(name, text) for name, text in PICTURES.items() if name in figures],
        report=REPORT if REPORT in figures else "",
        audit=str(audit.get("verdict", "") if isinstance(audit, Mapping) else audit),
        place=name or "path/to/this/folder",
        sample=("import torch\n", sample) if sample else SAMPLES[_modality(described)],
        causal=task is not None and task.causal,
        usage="" if task is None else task.usage(),
        recipe=recipe_rows(described),
        conflicts=conflicts,
        papers=[(paper.title, paper.url) for paper in _papers(described)],
        **_scores(described.scores),
    )
    if old_card is None:
        return str(new_card)
    part = GENERATED.search(str(new_card))
    assert part is not None
    text = f"{old_card.text.rstrip()}\n\n{part[0]}\n"
    if GENERATED.search(old_card.text):  # a function as replacement, because a string could contain escapes
        text = GENERATED.sub(lambda _: part[0], old_card.text, count=1)
    return _assemble(_merge_metadata(manual, new_card.data.to_dict()), text)


def summary(described: Description) -> str:
    """Return a short text about an artefact: networks, cut layers, stitch, task and scores."""
    described = plain(described)
    kind = "stitched model" if described.whole else "stitcher"
    (width_in, width_out), matcher = described.widths, described.recipe.get("matcher") or {}
    rows = {
        "source": f"{described.source}, up to {described.source_layer}",
        "target": f"{described.target}, after {described.target_layer}",
        "stitch": f"{described.body.get('name')}, {width_in} → {width_out}"
        + (f"; matcher {matcher['name']}" if "name" in matcher else ""),
        "scores": _headline(described.scores).replace("**", ""),
    }
    title = kind + (f" for {described.task}" if described.task else "")
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
    ours = {*TAGS, *re.findall(r"^\| matcher \| `(.*)` \|$", generated[0], re.MULTILINE)}
    manual: dict[str, Any] = {key: field for key, field in data.items() if key not in OURS}
    manual["tags"] = [tag for tag in data.get("tags") or () if tag not in ours]
    manual["model-index"] = [
        entry for entry in data.get("model-index") or ()
        if any((result.get("dataset") or {}).get("type") != HELD_OUT for result in entry.get("results") or [{}])
    ]  # fmt: skip
    return {key: field for key, field in manual.items() if field or key not in LISTS}


def _merge_metadata(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge metadata: tags of both cards, results of both (second card first), and otherwise the second card's."""
    tags = dict.fromkeys([*(first.get("tags") or ()), *(second.get("tags") or ())])
    results = [*(second.get("model-index") or ()), *(first.get("model-index") or ())]
    merged = {**first, **second, "tags": [*tags], "model-index": results}
    return {key: field for key, field in merged.items() if field or key not in LISTS}


def _conflicts(described: Description, licence: Any) -> list[str]:
    """Return the conflicts of the networks' licences with sharing a model of their weights under its licence."""
    conflicts, model_terms = [], _terms(licence)
    for side in SIDES if described.whole else ():
        parent = getattr(described, side).license
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
    """Return the terms of a licence from its name: ``nc``, ``nd`` and ``sa``, as in Creative Commons."""
    parts = set(str(licence or "").lower().split("-"))
    return parts | ({"sa"} if parts & {"gpl", "agpl", "lgpl"} else set())


def _metadata(described: Description, name: str | None, tags: list[str]) -> dict[str, Any]:
    parents = [end.id for end in (described.source, described.target) if _on_hub(end)]
    kind = TAGS[-1] if described.whole else TAGS[-2]
    data: dict[str, Any] = {"library_name": "hf_stitch", "tags": list(dict.fromkeys([*TAGS[:2], kind, *tags]))}
    if parents:
        data["base_model"] = list(dict.fromkeys(parents))
        data["base_model_relation"] = "merge" if described.whole else "adapter"
    if pipeline := described.pipeline:
        data["pipeline_tag"] = pipeline
    if results := _results(described.scores, described.pipeline):
        data["model-index"] = [{"name": name.split("/")[-1] if name else kind, "results": results}]
    return data


def _results(scores: Mapping[str, Any], pipeline: str) -> list[dict[str, Any]]:
    """Return the scores for the model index: all scores of the model, and the first score of each baseline."""
    metrics = [
        {
            "type": figure,
            "value": round(score["value"], 6),
            "name": figure.replace("_", " ") + ("" if who == "stitched" else f" of the baseline: {who}"),
            "args": {"predictor": who},
        }
        for who, figures in ordered(scores).items()
        for number, (figure, score) in enumerate(figures.items())
        if (number == 0 or who == "stitched") and _number(score["value"]) is not None
    ]
    if not metrics:
        return []
    dataset = {"type": HELD_OUT, "name": _samples(scores), "args": {"fingerprint": scores["data"]}}
    return [{"task": {"type": pipeline or scores["task"]}, "dataset": dataset, "metrics": metrics}]


def _papers(described: Description) -> list[Paper]:
    """Return the papers on stitching and on the matcher, or on the map if no matcher is recorded."""
    matcher = (described.recipe.get("matcher") or {}).get("name")
    method = _class("matchers", str(matcher)) if matcher else _class("stitches", str(described.body.get("name")))
    return list(dict.fromkeys((*STITCHING, *getattr(method, "papers", ()))))


def _class(kind: str, name: str) -> Any:
    try:
        return registries[kind].get(name) if name in registries[kind] else None
    except PluginError:
        return None


def _kind(body: Mapping[str, Any]) -> str:
    stitch_class = _class("stitches", str(body.get("name")))
    return f"a `{body.get('name')}` map" if stitch_class is None else str(stitch_class.title).rstrip(",")


def _headline(scores: Mapping[str, Any]) -> str:
    table = ordered(scores)
    if not table.get("stitched"):
        return ""
    figure = next(iter(table["stitched"]))
    stitched, higher = table["stitched"][figure], _figures(scores).get(figure, True)
    baselines = {who: row[figure] for who, row in table.items() if who != "stitched" and figure in row}
    names = {"identity": "no map", "mean_only": "mean only", "source": "source alone", "target": "target alone"}
    compared = ", ".join(f"{names.get(who, who)} {_cell(score, False)}" for who, score in baselines.items())
    rivals = [who for who in baselines if who not in SIDES]
    level = [names.get(who, who) for who in rivals if not _beats(stitched, baselines[who], higher)]
    if {"source", "target"} <= baselines.keys() and not _beats(stitched, baselines["source"], higher):
        # It may only show that the source is better.
        level += [names["source"]] * _beats(stitched, baselines["target"], higher)
    warning = f" **It is not shown to be better than: {', '.join(level)}.**" if level else ""
    compared = f" (for comparison: {compared})" if compared else ""
    return f"Its {figure.replace('_', ' ')} on {_samples(scores)} is **{_cell(stitched)}**{compared}.{warning}"


def _beats(score: Mapping[str, Any], baseline: Mapping[str, Any], higher_is_better: bool) -> bool:
    """Return whether the whole confidence interval of a score is better than a baseline."""
    low, high, reference = _number(score["low"]), _number(score["high"]), _number(baseline["value"])
    if low is None or high is None or reference is None:
        return False
    return low > reference if higher_is_better else high < reference


def recipe_rows(described: Description) -> dict[str, str]:
    """Return the recipe of an artefact, name -> Markdown, without unknown entries."""
    recipe, body, (width_in, width_out) = described.recipe, described.body, described.widths
    matcher, samples = dict(recipe.get("matcher") or {}), recipe.get("samples")
    rows = {
        "source": f"{_linked(described.source)}, cut after `{described.source_layer}`",
        "target": f"{_linked(described.target)}, cut after `{described.target_layer}`",
        "source weights": f"`{described.source.weights_hash}`" if described.source.weights_hash else "",
        "target weights": f"`{described.target.weights_hash}`" if described.target.weights_hash else "",
        "source licence": f"`{described.source.license}`" if described.source.license else "",
        "target licence": f"`{described.target.license}`" if described.target.license else "",
        "matcher": f"`{matcher.pop('name')}`" if "name" in matcher else "",
        "matcher options": _pairs(matcher),
        "chosen by the error on held-out anchors": _pairs(recipe.get("held_out_errors") or {}),
        "stitching layer": f"`{body.get('name')}`, {width_in} → {width_out}; {_pairs(body.get('fitted') or {})}",
        "pooling": f"`{described.stitch['pooling']}`",
        "anchors" if "anchors" in recipe else "fitted on": f"{samples} samples" if samples else "",
        "data": f"`{recipe['data']}`" if "data" in recipe else "",
        "data of the target": f"`{recipe['paired_data']}`" if "paired_data" in recipe else "",
        "held out": _held_out(recipe),
        "seed": str(recipe.get("seed", "")),
        "changed since the fit": "; ".join(map(str, recipe.get(CHANGED, ()))),
        "versions": ", ".join(f"{k} {v}" for k, v in sorted(recipe.get("versions", {}).items())),
    }
    return {key: text for key, text in rows.items() if text}


def _held_out(recipe: Mapping[str, Any]) -> str:
    if "test_data" in recipe:
        return f"separate samples, `{recipe['test_data']}`"
    size = recipe.get("test_size")
    return "" if size is None else f"{size:.0%} of the samples" if isinstance(size, float) else f"{size} samples"


def _scores(scores: Mapping[str, Any]) -> dict[str, Any]:
    table = ordered(scores)
    figures = list(dict.fromkeys(figure for row in table.values() for figure in row))
    return {
        "figures": [figure.replace("_", " ") for figure in figures],
        "scored_on": f"On {_samples(scores)} (`{scores['data']}`):" if table else "",
        "scores": {
            f"**{who}**" if who == "stitched" else who: [_cell(row.get(figure)) for figure in figures]
            for who, row in table.items()
        },
    }


def _samples(scores: Mapping[str, Any]) -> str:
    share = scores.get("fitted_share")
    return held_out(scores["n"], None if share is None else _number(share))


def ordered(scores: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return predictor -> metric -> score in reading order, because a saved config is sorted by name."""

    def sort(values: Mapping[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
        return {key: values[key] for key in sorted(values, key=lambda k: first.index(k) if k in first else len(first))}

    figures = tuple(_figures(scores))
    return {who: sort(row, figures) for who, row in sort(scores.get("scores", {}), PREDICTORS).items()}


def _figures(scores: Mapping[str, Any]) -> Mapping[str, bool]:
    """Return whether higher is better for each metric of the task; empty if the task is not installed."""
    name = str(scores.get("task"))
    return registries.tasks.get(name).figures if name in registries.tasks else {}


def _cell(score: Mapping[str, Any] | None, interval: bool = True) -> str:
    """Format a score, e.g. ``0.913 [0.902, 0.923]``; a dash if it is undefined."""
    if score is None or (number := _number(score["value"])) is None:
        return "–"
    low, high = _number(score["low"]), _number(score["high"])
    return f"{number:.3f}" + (f" [{low:.3f}, {high:.3f}]" if interval and low is not None and high is not None else "")


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _modality(described: Description) -> str:
    spec = described.stitch["source"]
    if (described.task or "").startswith("image") or spec["grid"]:
        return "image"
    return "text" if spec["layout"] == "bnd" else ""


def _on_hub(end: ModelReference) -> bool:
    return end.public.id is not None and bool(ON_HUB.fullmatch(end.public.id))


def _linked(end: ModelReference) -> str:
    if not _on_hub(end):
        if end.public.id is not None:
            return f"`{end.id}`"
        return "a network that is not on the Hub" + (f" ({end.summary})" if end.summary else "")
    at = f"/tree/{end.revision}" if end.revision else ""
    revision = f" at `{end.revision[:12]}`" if end.revision else ""
    return f"[{end.id}](https://huggingface.co/{end.id}{at}){revision}"


def _pairs(values: Mapping[str, Any]) -> str:
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
