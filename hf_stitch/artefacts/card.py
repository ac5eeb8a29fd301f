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
from hf_stitch.artefacts.parents import CHANGED
from hf_stitch.artefacts.record import SIDES
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
    "stitch.png": "Both networks as strips: what runs, what is left out, and the stitch between them",
    "scores.png": "Scores of the stitched model and of its baselines, with intervals",
}
"""Pictures beside a card, with their text alternatives."""

REPORT = "report.html"
"""Page of the evaluation beside a card."""

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
    described: Description,
    *,
    name: str | None = None,
    present: str | None = None,
    tags: Iterable[str] = (),
    sample: str | None = None,
    shown: Collection[str] = (),
) -> str:
    """Return the model card of a stitcher or of a whole stitched model."""
    described = plain(described)
    matcher = described.recipe.get("matcher") or {}
    data = _metadata(described, name, [*tags, *([str(matcher["name"])] if "name" in matcher else [])])
    audit = described.recipe.get("audit") or described.scores.get("audit") or ""
    made = ModelCard.from_template(
        ModelCardData(**data),
        template_path=str(TEMPLATE),
        title=name.split("/")[-1] if name else "Stitched model" if described.whole else "Stitcher",
        begin=BEGIN,
        end=END,
        about=described,
        source=_linked(described.source),
        target=_linked(described.target),
        kind=_kind(described.body),
        unnamed=[f"the {side} is {getattr(described, side).public}" for side in _unnamed(described)],
        headline=_headline(described.scores),
        pictures=[(name, text) for name, text in PICTURES.items() if name in shown],
        report=REPORT if REPORT in shown else "",
        audit=str(audit.get("verdict", "") if isinstance(audit, Mapping) else audit),
        snippet=_snippet(described, name, sample),
        recipe=_recipe(described),
        papers=[(paper.title, paper.url) for paper in _papers(described)],
        **_scores(described.scores),
    )
    return str(made) if present is None else _merged(made, present)


def summary(described: Description) -> str:
    """Return a few lines of text on an artefact: networks, cut layers, stitch, task and scores."""
    described = plain(described)
    kind = "stitched model" if described.whole else "stitcher"
    (width, other), matcher = described.widths, described.recipe.get("matcher") or {}
    rows = {
        "source": f"{described.source}, up to {described.source_layer}",
        "target": f"{described.target}, after {described.target_layer}",
        "stitch": f"{described.body.get('name')}, {width} → {other}"
        + (f"; matcher {matcher['name']}" if "name" in matcher else ""),
        "scores": _headline(described.scores).replace("**", ""),
    }
    title = kind + (f" for {described.task}" if described.task else "")
    return "\n".join([title, *(f"{name}  {text}" for name, text in rows.items() if text)])


def united(there: str | None, here: str | None) -> str | None:
    """Merge the cards of one artefact on the Hub and in a folder, as input for :func:`card`.

    If both contain text that a person added, the text of the folder is kept and a warning is issued.
    """
    if there is None or here is None:
        return there if here is None else here
    cards = _read(there), _read(here)
    added = [_added_text(each) for each in cards]
    if added[0] and added[1] and added[0] != added[1]:
        warn(
            "text that was added to the card on the Hub is replaced by the text of the local card; earlier commits "
            "still contain it"
        )
    known = [_by_hand(each) for each in cards]
    metadata = {**known[0], **known[1], "tags": _tags(*known)}
    return f"---\n{CardData(**metadata).to_yaml()}\n---\n{cards[1 if added[1] else 0].text}"


def _merged(made: ModelCard, present: str) -> str:
    """Return the existing card with its generated part and metadata replaced."""
    kept = _read(present)
    new, old = made.data.to_dict(), _by_hand(kept)
    merged = {**old, **new, "tags": _tags(old, new)}
    if others := old.get("model-index"):
        merged["model-index"] = [*new.get("model-index", ()), *others]
    part = GENERATED.search(str(made))
    assert part is not None
    text = kept.text
    # A function as replacement, because backslashes in a replacement string would be escapes.
    text = (
        GENERATED.sub(lambda _: part[0], text, count=1) if GENERATED.search(text) else f"{text.rstrip()}\n\n{part[0]}\n"
    )
    return f"---\n{CardData(**merged).to_yaml()}\n---\n{text}"


def _read(text: str) -> RepoCard:
    # RepoCard, because ModelCard would merge the results of all models in the model index into one.
    try:
        return RepoCard(text)
    except Exception as error:
        raise ValueError(f"the metadata of the existing card cannot be read ({error}); repair it first") from error


def _added_text(card: RepoCard) -> str:
    """Return the text that a person added; the title does not count."""
    return re.sub(r"\A# .*", "", GENERATED.sub("", card.text).strip()).strip()


def _by_hand(card: RepoCard) -> dict[str, Any]:
    """Return the metadata that a person added: those that do not belong to the generated part of the card."""
    data: dict[str, Any] = card.data.to_dict()
    found = GENERATED.search(card.text)
    if found is None:
        return data
    generated, parents, own = found[0], data.get("base_model") or [], {"library_name"}
    if data.get("pipeline_tag") in {tag for kind in registries.tasks.usable() for tag in kind.pipelines.values()}:
        own |= {"pipeline_tag"}
    named = [parents] if isinstance(parents, str) else parents
    if all(f"[{id}](https://huggingface.co/{id}" in generated for id in named):
        own |= {"base_model", "base_model_relation"}
    data["tags"] = [
        tag for tag in data.get("tags") or () if tag not in TAGS and f"| matcher | `{tag}` |" not in generated
    ]
    data["model-index"] = [entry for entry in data.get("model-index") or () if not _is_own(entry, generated)]
    return {key: value for key, value in data.items() if key not in own and (value or key not in LISTS)}


def _is_own(entry: Mapping[str, Any], generated: str) -> bool:
    """Return whether an entry of the model index holds the scores in the generated part of the card."""
    data = [result.get("dataset") or {} for result in entry.get("results") or ()]
    return bool(data) and all(
        d.get("type") == HELD_OUT and str((d.get("args") or {}).get("fingerprint")) in generated for d in data
    )


def _tags(*metadata: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(tag for each in metadata for tag in each.get("tags") or ()))


def _metadata(described: Description, name: str | None, tags: list[str]) -> dict[str, Any]:
    parents = [end.id for end in (described.source, described.target) if _on_hub(end)]
    kind = TAGS[-1] if described.whole else TAGS[-2]
    data: dict[str, Any] = {
        "library_name": "hf_stitch",
        "tags": list(dict.fromkeys([*TAGS[:2], kind, *tags])),
    }
    if parents:
        data["base_model"] = list(dict.fromkeys(parents))
        data["base_model_relation"] = "merge" if described.whole else "adapter"
    if pipeline := described.pipeline:
        data["pipeline_tag"] = pipeline
    if results := _results(described.scores, described.pipeline):
        data["model-index"] = [{"name": name.split("/")[-1] if name else kind, "results": results}]
    return data


def _results(scores: Mapping[str, Any], pipeline: str) -> list[dict[str, Any]]:
    """Return the scores for the model index: all figures of the model, and the first figure of each baseline."""
    metrics = [
        {
            "type": figure,
            "value": round(score["value"], 6),
            "name": figure.replace("_", " ") + ("" if who == "stitched" else f" of the baseline: {who}"),
            "args": {"predictor": who},
        }
        for who, figures in ordered(scores).items()
        for place, (figure, score) in enumerate(figures.items())
        if (place == 0 or who == "stitched") and _number(score["value"]) is not None
    ]
    if not metrics:
        return []
    dataset = {"type": HELD_OUT, "name": _samples(scores), "args": {"fingerprint": scores["data"]}}
    return [{"task": {"type": pipeline or scores["task"]}, "dataset": dataset, "metrics": metrics}]


def _papers(described: Description) -> list[Paper]:
    """Return the papers on stitching and those of the matcher, or of the map if no matcher is recorded."""
    matcher = (described.recipe.get("matcher") or {}).get("name")
    found = _class("matchers", str(matcher)) if matcher else _class("stitches", str(described.body.get("name")))
    return list(dict.fromkeys((*STITCHING, *getattr(found, "papers", ()))))


def _class(kind: str, name: str) -> Any:
    """Return the registered class of this name, if it is installed."""
    try:
        return registries[kind].get(name) if name in registries[kind] else None
    except PluginError:
        return None


def _kind(body: Mapping[str, Any]) -> str:
    """Describe a map in words."""
    known = _class("stitches", str(body.get("name")))
    return f"a map of the kind `{body.get('name')}`" if known is None else str(known.title).rstrip(",")


def _headline(scores: Mapping[str, Any]) -> str:
    """Return a sentence with the first figure and its baselines."""
    table = ordered(scores)
    if not table.get("stitched"):
        return ""
    figure = next(iter(table["stitched"]))
    own, higher = table["stitched"][figure], _figures(scores).get(figure, True)
    others = {who: row[figure] for who, row in table.items() if who != "stitched" and figure in row}
    names = {"identity": "no map", "mean_only": "mean only", "source": "source alone", "target": "target alone"}
    compared = ", ".join(f"{names.get(who, who)} {_cell(score, False)}" for who, score in others.items())
    rivals = [who for who in others if who not in SIDES]
    level = [names.get(who, who) for who in rivals if not _beats(own, others[who], higher)]
    if {"source", "target"} <= others.keys() and not _beats(own, others["source"], higher):
        level += [names["source"]] * _beats(own, others["target"], higher)  # it may only show that the source is better
    warning = f" **It is not shown to be better than: {', '.join(level)}.**" if level else ""
    compared = f" (for comparison: {compared})" if compared else ""
    return f"Its {figure.replace('_', ' ')} on {_samples(scores)} is **{_cell(own)}**{compared}.{warning}"


def _beats(own: Mapping[str, Any], other: Mapping[str, Any], higher_is_better: bool) -> bool:
    """Return whether the whole interval is better than the value of another predictor."""
    low, high, value = _number(own["low"]), _number(own["high"]), _number(other["value"])
    if low is None or high is None or value is None:
        return False
    return low > value if higher_is_better else high < value


def _recipe(described: Description) -> dict[str, str]:
    recipe, body, (width, other) = described.recipe, described.body, described.widths
    matcher = dict(recipe.get("matcher") or {})
    rows = {
        "source": f"{_linked(described.source)}, cut after `{described.source_layer}`",
        "target": f"{_linked(described.target)}, cut after `{described.target_layer}`",
        "source weights": f"`{described.source.weights_hash}`" if described.source.weights_hash else "",
        "target weights": f"`{described.target.weights_hash}`" if described.target.weights_hash else "",
        "matcher": f"`{matcher.pop('name')}`" if "name" in matcher else "",
        "matcher options": _pairs(matcher),
        "chosen by the error on held-out anchors": _pairs(recipe.get("held_out_errors") or {}),
        "stitching layer": f"`{body.get('name')}`, {width} → {other}; {_pairs(body.get('fitted') or {})}",
        "pooling": f"`{described.stitch['pooling']}`",
        "anchors" if "anchors" in recipe else "fitted on": _count(recipe.get("samples")),
        "data": f"`{recipe['data']}`" if "data" in recipe else "",
        "data of the target": f"`{recipe['paired_data']}`" if "paired_data" in recipe else "",
        "held out": _held_out(recipe),
        "seed": str(recipe.get("seed", "")),
        "changed since the fit": "; ".join(map(str, recipe.get(CHANGED, ()))),
        "versions": ", ".join(f"{k} {v}" for k, v in sorted(recipe.get("versions", {}).items())),
    }
    return {key: value for key, value in rows.items() if value}


def _count(samples: int | None) -> str:
    return "" if samples is None else f"{samples} samples"


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
    """Return predictor -> figure -> score in reading order, because a saved config is sorted by name."""

    def sort(values: Mapping[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
        return {key: values[key] for key in sorted(values, key=lambda k: first.index(k) if k in first else len(first))}

    figures = tuple(_figures(scores))
    return {who: sort(row, figures) for who, row in sort(scores.get("scores", {}), PREDICTORS).items()}


def _figures(scores: Mapping[str, Any]) -> Mapping[str, bool]:
    """Return the figures of the task that was scored, and whether higher is better; empty if it is not installed."""
    name = str(scores.get("task"))
    return registries.tasks.get(name).figures if name in registries.tasks else {}


def _cell(score: Mapping[str, Any] | None, interval: bool = True) -> str:
    """Format a score, e.g. ``0.913 [0.902, 0.923]``; a dash if it is undefined."""
    if score is None or (value := _number(score["value"])) is None:
        return "–"
    low, high = _number(score["low"]), _number(score["high"])
    return f"{value:.3f}" + (f" [{low:.3f}, {high:.3f}]" if interval and low is not None and high is not None else "")


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _snippet(described: Description, name: str | None, sample: str | None) -> str:
    spec = described.stitch["source"]
    kind = (
        "image"
        if (described.task or "").startswith("image") or spec["grid"]
        else "text"
        if spec["layout"] == "bnd"
        else ""
    )
    imports, default = ("import torch\n", sample) if sample else SAMPLES[kind]
    place = name or "path/to/this/folder"
    given = ", ".join(f"{side}={_given(described, side)}" for side in _unnamed(described))
    load = (
        f'StitchedModel.from_pretrained("{place}")'
        if described.whole
        else f'Stitcher.from_pretrained("{place}").attach({given})'
    )
    registered = "import hf_stitch.auto  # Auto classes and pipelines of transformers then load the model too\n"
    lines = [
        f"{registered if described.whole else ''}{imports}import hf_stitch\n",
        f"model = hf_stitch.{load}",
        f"sample = {default}",
        "inputs = model.preprocess([sample])",
    ]
    if described.task in registries.tasks and registries.tasks.get(str(described.task)).causal:
        lines.append("print(model.processor.decode(model.generate(**inputs, max_new_tokens=20)[0]))")
    else:
        lines.append("output = model(**inputs)")
    if described.task in registries.tasks and (usage := registries.tasks.build(str(described.task)).usage()):
        lines.append(usage)
    return "\n".join(lines)


def _unnamed(described: Description) -> list[str]:
    """Return the sides whose network has no public name."""
    return [side for side in SIDES if getattr(described, side).public.id is None]


def _given(described: Description, side: str) -> str:
    """Return a Python expression for a network without a public name."""
    if getattr(described, side).library != "torch":
        return f"your_{side}"
    return f"hf_stitch.load(your_{side}, example_inputs=your_batch, processor=your_transform)"


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
        return replace(value, **{each.name: plain(getattr(value, each.name)) for each in fields(value)})
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return re.sub(r"[\s`|<>\[\]*\\]+", " ", visible(value)).strip() if isinstance(value, str) else value
