"""The card of either artefact: what it is, how to use it, how it was made, how well it does beside its baselines."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CardData, ModelCard, ModelCardData, RepoCard

from hf_stitch.artefacts.description import Description
from hf_stitch.papers import CSISZARIK_2021, LENC_2015, Paper
from hf_stitch.reference import ModelReference
from hf_stitch.registry import PluginError, registries

TEMPLATE = Path(__file__).with_name("card.md.jinja")
BEGIN = "<!-- hf-stitch: from here to the end mark is written anew at every save and push; write above or below -->"
END = "<!-- hf-stitch: end mark -->"
GENERATED = re.compile(r"<!-- hf-stitch: from here.*?-->.*?<!-- hf-stitch: end mark -->", re.DOTALL)
ON_HUB = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")

STITCHING = (LENC_2015, CSISZARIK_2021)
"""The papers of stitching itself."""

PREDICTORS = ("stitched", "identity", "mean_only", "target", "chance")
FIGURES = ("accuracy", "relative_accuracy", "perplexity", "relative_perplexity", "cross_entropy", "agreement")
LESS_IS_BETTER = ("perplexity", "relative_perplexity", "cross_entropy")
TASKS = ("image-classification", "text-classification", "text-generation")
TAGS = ("hf_stitch", "model-stitching", "stitcher", "stitched-model")
HELD_OUT = "held-out"
LISTS = ("tags", "model-index")
SAMPLES = {
    "image": ("from PIL import Image\n", 'Image.new("RGB", (224, 224))  # a picture of yours'),
    "text": ("", '"A text of yours."'),
    "": ("", "your_sample"),
}


def card(
    described: Description,
    *,
    name: str | None = None,
    present: str | None = None,
    tags: Iterable[str] = (),
    sample: str | None = None,
) -> str:
    """The model card (Markdown with metadata) of a stitcher or of a whole stitched model.

    Args:
        described: What it is.
        name: Its id on the Hub; ``None`` for a folder.
        present: The card that is there. Its text outside the marks stays, and so does metadata that is not written
            here; tags are joined.
        tags: More tags.
        sample: Python for one raw sample; default: by the task.

    Raises:
        ValueError: If the metadata of the present card cannot be read.
    """
    matcher = described.recipe.get("matcher") or {}
    data = _metadata(described, name, [*tags, *([_plain(matcher["name"])] if "name" in matcher else [])])
    made = ModelCard.from_template(
        ModelCardData(**data),
        template_path=str(TEMPLATE),
        title=name.split("/")[-1] if name else "Stitched model" if described.whole else "Stitcher",
        begin=BEGIN,
        end=END,
        summary=_summary(described),
        headline=_headline(described.scores),
        audit=_audit(described),
        snippet=_snippet(described, name, sample),
        needs=_needs(described),
        recipe=_recipe(described),
        papers=[(paper.title, paper.url) for paper in _papers(described)],
        **_scores(described.scores),
    )
    return str(made) if present is None else _merged(made, present)


def united(there: str | None, here: str | None) -> str | None:
    """Two cards of one artefact, of which :func:`card` keeps what a person wrote.

    Args:
        there: That of the Hub.
        here: That of a folder. Where a person wrote into it, its text is taken, else the Hub's; metadata are joined.

    Returns:
        The card to go on from; ``None`` where there is neither. A warning tells where words of the Hub's get lost.

    Raises:
        ValueError: If the metadata of either cannot be read.
    """
    if there is None or here is None:
        return there if here is None else here
    cards = _read(there), _read(here)
    said = [_words(each) for each in cards]
    if said[0] and said[1] and said[0] != said[1]:
        warnings.warn(
            "what a person wrote into the card on the Hub is replaced by what is written in the card here; an earlier "
            "commit has it",
            stacklevel=2,
        )
    known = [_by_hand(each) for each in cards]
    metadata = {**known[0], **known[1], "tags": _tags(*known)}
    return f"---\n{CardData(**metadata).to_yaml()}\n---\n{cards[1 if said[1] else 0].text}"


def _merged(made: ModelCard, present: str) -> str:
    """The present card with its generated part and metadata refreshed."""
    kept = _read(present)
    new, old = made.data.to_dict(), _by_hand(kept)
    merged = {**old, **new, "tags": _tags(old, new)}
    if others := old.get("model-index"):
        merged["model-index"] = [*new.get("model-index", ()), *others]
    part = GENERATED.search(str(made))
    assert part is not None
    text = kept.text
    # A function, as a replacement text would be read for backslashes.
    text = (
        GENERATED.sub(lambda _: part[0], text, count=1) if GENERATED.search(text) else f"{text.rstrip()}\n\n{part[0]}\n"
    )
    return f"---\n{CardData(**merged).to_yaml()}\n---\n{text}"


def _read(text: str) -> RepoCard:
    # Not as a ModelCard, which would take all results for those of one model.
    try:
        return RepoCard(text)
    except Exception as error:
        raise ValueError(f"the metadata of the card that is there cannot be read ({error}); repair it first") from error


def _words(card: RepoCard) -> str:
    """What a person wrote into the text; a title alone is none."""
    return re.sub(r"\A# .*", "", GENERATED.sub("", card.text).strip()).strip()


def _by_hand(card: RepoCard) -> dict[str, Any]:
    """The metadata that a person wrote: those that the generated part of the card does not tell of."""
    data: dict[str, Any] = card.data.to_dict()
    found = GENERATED.search(card.text)
    if found is None:
        return data
    told, parents, own = found[0], data.get("base_model") or [], {"library_name"}
    if data.get("pipeline_tag") in TASKS:
        own |= {"pipeline_tag"}
    named = [parents] if isinstance(parents, str) else parents
    if all(f"[{id}](https://huggingface.co/{id}" in told for id in named):
        own |= {"base_model", "base_model_relation"}
    data["tags"] = [tag for tag in data.get("tags") or () if tag not in TAGS and f"| matcher | `{tag}` |" not in told]
    data["model-index"] = [entry for entry in data.get("model-index") or () if not _is_own(entry, told)]
    return {key: value for key, value in data.items() if key not in own and (value or key not in LISTS)}


def _is_own(entry: Mapping[str, Any], told: str) -> bool:
    """Whether results are those that the generated part of a card tells of."""
    data = [result.get("dataset") or {} for result in entry.get("results") or ()]
    return bool(data) and all(
        d.get("type") == HELD_OUT and str((d.get("args") or {}).get("fingerprint")) in told for d in data
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
    if described.task in TASKS:
        data["pipeline_tag"] = described.task
    if results := _results(described.scores):
        data["model-index"] = [{"name": name.split("/")[-1] if name else kind, "results": results}]
    return data


def _results(scores: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was measured, as the Hub's index of results has it: all figures, and of each baseline the first."""
    metrics = [
        {
            "type": figure,
            "value": round(score["value"], 6),
            "name": figure.replace("_", " ") + ("" if who == "stitched" else f" of the baseline: {who}"),
            "args": {"predictor": who},
        }
        for who, figures in _ordered(scores).items()
        for place, (figure, score) in enumerate(figures.items())
        if (place == 0 or who == "stitched") and _number(score["value"]) is not None
    ]
    if not metrics:
        return []
    dataset = {"type": HELD_OUT, "name": f"{scores['n']} held-out samples", "args": {"fingerprint": scores["data"]}}
    return [{"task": {"type": scores["task"]}, "dataset": dataset, "metrics": metrics}]


def _papers(described: Description) -> list[Paper]:
    """Those of stitching, and those of the matcher or, where none is recorded, of the map."""
    matcher = (described.recipe.get("matcher") or {}).get("name")
    found = _class("matchers", str(matcher)) if matcher else _class("stitches", str(described.body.get("name")))
    return list(dict.fromkeys((*STITCHING, *getattr(found, "papers", ()))))


def _class(kind: str, name: str) -> Any:
    """What stands behind a name, if it is installed."""
    try:
        return registries[kind].get(name) if name in registries[kind] else None
    except PluginError:
        return None


def _summary(described: Description) -> str:
    name, (width, other) = str(described.body.get("name")), described.widths
    known = _class("stitches", name)
    kind = f"a map of the kind `{_plain(name)}`" if known is None else known.title
    what = "This network is made of two" if described.whole else "This is the link between two networks"
    return (
        f"{what}: {_linked(described.source)} runs up to `{_plain(described.source_layer)}`, {kind} "
        f"({width} → {other} features) carries what it says there over, and "
        f"{_linked(described.target)} goes on from behind `{_plain(described.target_layer)}`."
    )


def _headline(scores: Mapping[str, Any]) -> str:
    """The first figure in words."""
    table = _ordered(scores)
    if "stitched" not in table:
        return ""
    figure = next(iter(table["stitched"]))
    own = table["stitched"][figure]
    others = {who: row[figure] for who, row in table.items() if who != "stitched" and figure in row}
    names = {"identity": "with no map", "mean_only": "the mean only", "target": "the target alone", "chance": "chance"}
    beside = "; ".join(f"{names.get(who, _plain(who))}: {_cell(score, False)}" for who, score in others.items())
    level = [names.get(who, _plain(who)) for who in others if who != "target" and not _beats(own, others[who], figure)]
    warning = f" **It is not shown to do better than: {', '.join(level)}.**" if level else ""
    return f"Its {figure.replace('_', ' ')} on {scores['n']} held-out samples is **{_cell(own)}** ({beside}).{warning}"


def _beats(own: Mapping[str, Any], other: Mapping[str, Any], figure: str) -> bool:
    """Whether the whole interval is on the better side of another's value."""
    low, high, value = _number(own["low"]), _number(own["high"]), _number(other["value"])
    if low is None or high is None or value is None:
        return False
    return high < value if figure in LESS_IS_BETTER else low > value


def _audit(described: Description) -> str:
    found = described.recipe.get("audit") or described.scores.get("audit") or ""
    return _plain(found.get("verdict", "") if isinstance(found, Mapping) else found)


def _recipe(described: Description) -> dict[str, str]:
    recipe, body, (width, other) = described.recipe, described.body, described.widths
    matcher = dict(recipe.get("matcher") or {})
    rows = {
        "source": f"{_linked(described.source)}, cut behind `{_plain(described.source_layer)}`",
        "target": f"{_linked(described.target)}, cut behind `{_plain(described.target_layer)}`",
        "weights of the source": f"`{described.source.weights_hash}`" if described.source.weights_hash else "",
        "weights of the target": f"`{described.target.weights_hash}`" if described.target.weights_hash else "",
        "matcher": f"`{_plain(matcher.pop('name'))}`" if "name" in matcher else "",
        "options": _pairs(matcher),
        "map": f"`{_plain(body.get('name'))}`, {width} → {other}; {_pairs(body.get('fitted') or {})}",
        "rows": f"`{_plain(described.stitch['pooling'])}`",
        "anchors" if "anchors" in recipe else "fitted on": _count(recipe.get("samples")),
        "data": f"`{_plain(recipe['data'])}`" if "data" in recipe else "",
        "the target's data": f"`{_plain(recipe['paired_data'])}`" if "paired_data" in recipe else "",
        "held out": _held_out(recipe),
        "seed": _plain(recipe.get("seed", "")),
        "versions": ", ".join(f"{_plain(k)} {_plain(v)}" for k, v in sorted(recipe.get("versions", {}).items())),
    }
    return {key: value for key, value in rows.items() if value}


def _count(samples: int | None) -> str:
    return "" if samples is None else f"{samples} samples"


def _held_out(recipe: Mapping[str, Any]) -> str:
    if "test_data" in recipe:
        return f"data of their own, `{_plain(recipe['test_data'])}`"
    size = recipe.get("test_size")
    return "" if size is None else f"{size:.0%} of the samples" if isinstance(size, float) else f"{size} samples"


def _scores(scores: Mapping[str, Any]) -> dict[str, Any]:
    table = _ordered(scores)
    figures = list(dict.fromkeys(figure for row in table.values() for figure in row))
    return {
        "figures": [figure.replace("_", " ") for figure in figures],
        "scored_on": f"On {scores['n']} held-out samples (`{_plain(scores['data'])}`):" if table else "",
        "scores": {
            f"**{who}**" if who == "stitched" else _plain(who): [_cell(row.get(figure)) for figure in figures]
            for who, row in table.items()
        },
    }


def _ordered(scores: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Predictor -> figure -> score, in the order in which they are read: a config on disk is sorted by name."""

    def sort(values: Mapping[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
        return {key: values[key] for key in sorted(values, key=lambda k: first.index(k) if k in first else len(first))}

    return {who: sort(row, FIGURES) for who, row in sort(scores.get("scores", {}), PREDICTORS).items()}


def _cell(score: Mapping[str, Any] | None, interval: bool = True) -> str:
    """For example ``0.913 [0.902, 0.923]``; a dash for what is undefined."""
    if score is None or (value := _number(score["value"])) is None:
        return "–"
    low, high = _number(score["low"]), _number(score["high"])
    return f"{value:.3f}" + (f" [{low:.3f}, {high:.3f}]" if interval and low is not None and high is not None else "")


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _snippet(described: Description, name: str | None, sample: str | None) -> str:
    form = described.stitch["source"]
    kind = (
        "image"
        if (described.task or "").startswith("image") or form["grid"]
        else "text"
        if form["layout"] == "bnd"
        else ""
    )
    imports, default = ("import torch\n", sample) if sample else SAMPLES[kind]
    place = name or "folder-of-this-card"
    given = ", ".join(f"{side}=your_{side}" for side in _unnamed(described))
    load = (
        f'StitchedModel.from_pretrained("{place}")'
        if described.whole
        else f'Stitcher.from_pretrained("{place}").attach({given})'
    )
    lines = [
        f"{imports}import hf_stitch\n",
        f"model = hf_stitch.{load}",
        f"sample = {default}",
        "inputs = model.preprocess([sample])",
    ]
    if described.task == "text-generation":
        lines.append("print(model.processor.decode(model.generate(**inputs, max_new_tokens=20)[0]))")
    else:
        lines.append("output = model(**inputs)")
    if described.task in ("image-classification", "text-classification"):
        lines.append("print(model.config.id2label[output.logits.argmax(-1).item()])")
    return "\n".join(lines)


def _needs(described: Description) -> str:
    if described.whole:
        return "It runs alone: both halves are here."
    if unnamed := _unnamed(described):
        return (
            f"Give it the {' and the '.join(unnamed)}, which cannot be downloaded; whether the weights are the right "
            "ones is checked."
        )
    return "Both parents are downloaded at the revisions below, and their weights checked."


def _unnamed(described: Description) -> list[str]:
    """The sides whose network nobody else can find by name."""
    return [side for side in ("source", "target") if getattr(described, side).public.id is None]


def _on_hub(end: ModelReference) -> bool:
    return end.public.id is not None and bool(ON_HUB.fullmatch(end.public.id))


def _linked(end: ModelReference) -> str:
    if not _on_hub(end):
        return "a network that is not on the Hub" if end.public.id is None else f"`{_plain(end.id)}`"
    at = f"/tree/{_plain(end.revision)}" if end.revision else ""
    revision = f" at `{_plain(end.revision)[:12]}`" if end.revision else ""
    return f"[{end.id}](https://huggingface.co/{end.id}{at}){revision}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{_plain(k)} = {_plain(v)}" for k, v in sorted(values.items()))


def _plain(value: Any) -> str:
    """A value as text of one line that means nothing to Markdown or HTML: records may come from anyone."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return re.sub(r"[\s`|<>\[\]*\\]+", " ", text).strip()
