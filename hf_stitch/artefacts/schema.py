"""The fields of a record: their types and ranges, checked before anything is built from them.

A record may be untrusted. A :data:`Reader` checks a value of a record and returns it, without keys that this version
does not know. Its error names the file, the field, what was expected and what the record contains.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch

from hf_stitch.adapters.cutting.cut import Padding
from hf_stitch.artefacts.record import AGAIN, MODEL_TYPE, check_counts, check_format, known
from hf_stitch.registry import registries
from hf_stitch.representation import LAYOUTS, POOLINGS
from hf_stitch.tasks.classification import MULTI_LABEL, REGRESSION


@dataclass(frozen=True)
class Place:
    """A field of a file, for messages."""

    file: str
    field: str = ""  # the path of the field in it; empty for the whole record

    def __truediv__(self, key: str | int) -> Place:
        """Return the place of a key or of an index in the value at this place."""
        return Place(self.file, f"{self.field}.{key}" if self.field else str(key))

    def __str__(self) -> str:
        """Return e.g. ``source.cut in config.json of org/name``."""
        return f"{self.field} in {self.file}" if self.field else self.file

    def wrong(self, expected: str, found: Any) -> ValueError:
        """Create the error for a wrong value."""
        text = repr(found)
        shown = text if len(text) < 80 else f"{text[:80]}…"
        return ValueError(
            f"{self.file} is damaged: {self.field or 'the record'} must be {expected}, got {shown}; {AGAIN}"
        )


Reader = Callable[[Any, Place], Any]
"""Checks the value at a place and returns it, or raises an error."""


def value(expected: str, holds: Callable[[Any], bool]) -> Reader:
    """Make a reader of values with a property."""

    def read(found: Any, at: Place) -> Any:
        if not holds(found):
            raise at.wrong(expected, found)
        return found

    return read


def whole(least: int = -(2**53), most: int = 2**53) -> Reader:
    """Make a reader of whole numbers."""
    limit = "a whole number" if least < -(2**52) else f"a whole number, at least {least}"
    return value(limit, lambda found: type(found) is int and least <= found <= most)


def one_of(*names: str) -> Reader:
    """Make a reader of one of several texts."""
    return value(f"one of {', '.join(names)}", lambda found: isinstance(found, str) and found in names)


def maybe(reader: Reader) -> Reader:
    """Make a reader that also accepts ``null``."""
    return lambda found, at: None if found is None else reader(found, at)


def several(reader: Reader, length: int | None = None) -> Reader:
    """Make a reader of lists."""

    def read(found: Any, at: Place) -> list[Any]:
        if not isinstance(found, (list, tuple)) or length not in (None, len(found)):
            raise at.wrong("a list" if length is None else f"a list of {length}", found)
        return [reader(item, at / place) for place, item in enumerate(found)]

    return read


def table(reader: Reader) -> Reader:
    """Make a reader of objects with any keys."""

    def read(found: Any, at: Place) -> dict[str, Any]:
        if not isinstance(found, Mapping):
            raise at.wrong("an object", found)
        return {key: reader(item, at / key) for key, item in found.items()}

    return read


def fields(optional: Collection[str] = (), *, others: bool = False, **readers: Reader) -> Reader:
    """Make a reader of objects with known keys."""

    def read(found: Any, at: Place) -> dict[str, Any]:
        if not isinstance(found, Mapping):
            raise at.wrong("an object", found)
        if missing := [key for key in readers if key not in found and key not in optional]:
            raise at.wrong(f"an object with {' and '.join(missing)}", list(found))
        kept = dict(found) if others else known(found, readers, str(at))
        return kept | {key: reader(found[key], at / key) for key, reader in readers.items() if key in found}

    return read


# -- fields of every record --------------------------------------------------------------------------------------------
TEXT = value("a text", lambda found: isinstance(found, str))
FLAG = value("true or false", lambda found: isinstance(found, bool))
KEY = value("a text or a whole number", lambda found: type(found) in (str, int))
ANYTHING: Reader = lambda found, at: found  # noqa: E731
DTYPE = value(
    "a dtype of torch", lambda found: isinstance(found, str) and isinstance(getattr(torch, found, None), torch.dtype)
)
SHARE = value("a number from 0 to 1", lambda found: type(found) in (int, float) and 0 <= found <= 1)
SPEC = fields(layout=one_of(*LAYOUTS), width=whole(1), grid=maybe(several(whole(1), 2)), prefix_tokens=whole(0))
REFERENCE = fields(
    ("revision", "task", "kwargs", "weights_hash", "summary"),
    others=True,  # ModelReference.from_dict checks and names them
    id=maybe(TEXT),
    library=TEXT,
    revision=maybe(TEXT),
    task=maybe(TEXT),
    kwargs=table(ANYTHING),
    weights_hash=maybe(TEXT),
    summary=maybe(TEXT),
)
MAP = fields(
    ("fitted", "in_features", "out_features"),
    others=True,  # the class of the map rejects options that it does not know
    name=TEXT,
    fitted=table(ANYTHING),
    in_features=whole(1),
    out_features=whole(1),
)
REWRITE = fields(others=True, name=TEXT)  # its class rejects options that it does not know


STITCH = fields(("prefix",), source=SPEC, target=SPEC, pooling=one_of(*POOLINGS), body=MAP, prefix=maybe(MAP))
REQUIREMENT = fields(
    ("file",), registry=one_of(*registries), name=TEXT, distribution=maybe(TEXT), version=maybe(TEXT), file=TEXT
)
SIGNATURE = fields(("manifest", "checksum"), others=True, manifest=table(TEXT), checksum=maybe(TEXT))
"""How the files of a record are verified."""


# -- halves ------------------------------------------------------------------------------------------------------------
def _outline(found: Any, at: Place) -> dict[str, Any]:
    """Read the outline of the output of a module: an object whose only key is the kind of the output."""
    if not isinstance(found, Mapping) or len(found) != 1 or next(iter(found)) not in OUTLINES:
        raise at.wrong(f"an object with one of {', '.join(OUTLINES)}", found)
    ((kind, content),) = found.items()
    return {kind: OUTLINES[kind](content, at / kind)}


OUTLINES: dict[str, Reader] = {
    "tensor": fields(
        dims=several(several(whole(), 4)), dtype=lambda found, at: found if found == "cut" else DTYPE(found, at)
    ),
    "argument": several(KEY),
    "value": ANYTHING,
    "tuple": several(_outline),
    "list": several(_outline),
    "dict": table(_outline),
}
CUT = fields(
    ("axes", "padding"),
    layer=TEXT,
    path=several(KEY),
    spec=SPEC,
    dtype=DTYPE,
    cost=SHARE,
    axes=several(whole(0)),
    padding=one_of(*get_args(Padding)),
)
PLAN = fields(
    ("materialise", "after", "records"),
    kind=one_of("stubs", "full"),
    stubs=table(_outline),
    entry=maybe(_outline),
    materialise=FLAG,
    after=table(maybe(_outline)),
    records=FLAG,
)
INTERFACE = fields(
    ("dtypes", "options", "special_ids", "filler_id", "pad_id", "arguments", "max_tokens", "given", "start_id"),
    content=value(
        "a list of one text or more",
        lambda found: isinstance(found, (list, tuple)) and len(found) > 0 and all(isinstance(n, str) for n in found),
    ),
    modality=one_of("image", "text", "tensor"),
    shapes=table(several(whole(1))),
    dtypes=table(DTYPE),
    options=table(ANYTHING),
    special_ids=several(whole()),
    filler_id=whole(),
    pad_id=maybe(whole()),
    arguments=several(TEXT),
    max_tokens=maybe(whole(1)),
    given=several(TEXT),
    start_id=maybe(whole()),
)
_HALF = fields(
    ("why", "half_hash", "reading"),
    blueprint=maybe(fields(("rewrites",), others=True, library=TEXT, rewrites=several(REWRITE))),
    why=TEXT,
    cut=CUT,
    plan=PLAN,
    interface=INTERFACE,
    reference=REFERENCE,
    half_hash=TEXT,
    reading=maybe(fields((), start=whole(), own=maybe(several(whole(1))))),
)


def _half(found: Any, at: Place) -> dict[str, Any]:
    """Read one half, whose fields must fit together."""
    half = _HALF(found, at)
    blueprint = half["blueprint"] or {}
    if blueprint.get("library") == MODEL_TYPE:  # a stitched model itself
        place = at / "blueprint" / "config"
        half["blueprint"] = {**blueprint, "config": read_model(blueprint.get("config"), str(place))}
    cut, entry, interface = half["cut"], half["plan"]["entry"], half["interface"]
    axes, layout = cut.get("axes"), cut["spec"]["layout"]
    if axes and sorted(axes) != list(range(len(layout))):
        raise (at / "cut" / "axes").wrong(f"an order of the {len(layout)} axes of {layout}", axes)
    if entry is not None and _rank(entry, cut["path"]) != len(layout):
        raise (at / "cut" / "path").wrong(
            f"the way to a tensor of {len(layout)} axes in plan.entry, the output of {cut['layer']!r}", cut["path"]
        )
    if interface["modality"] != "text":
        for name in ("shapes", "dtypes"):
            if not set(interface["content"]) <= (interface.get(name) or {}).keys():
                raise (at / "interface" / name).wrong(
                    f"an object with {' and '.join(interface['content'])}", interface.get(name)
                )
    return half


def _rank(outline: dict[str, Any], path: list[Any]) -> int | None:
    """Return the number of axes of the tensor at a path in the output of a module; ``None`` if there is none."""
    for key in path:
        ((kind, content),) = outline.items()
        parts = content if kind == "dict" else dict(enumerate(content)) if kind in ("tuple", "list") else {}
        if key not in parts:
            return None
        outline = parts[key]
    return len(outline["tensor"]["dims"]) if "tensor" in outline else None


# -- records -----------------------------------------------------------------------------------------------------------
NUMBER = value(
    "a number, 'nan', 'inf' or '-inf'",
    lambda found: (
        type(found) is float or (type(found) is int and abs(found) < 2**53) or found in ("nan", "inf", "-inf")
    ),
)
_SCORES = fields(
    ("fitted_share",),
    others=True,
    task=TEXT,
    n=whole(0),
    data=TEXT,
    fitted_share=maybe(NUMBER),
    scores=table(table(fields(value=NUMBER, low=NUMBER, high=NUMBER))),
)
SCORES: Reader = lambda found, at: _SCORES(found, at) if found else found  # noqa: E731
RECIPE = fields(
    ("matcher", "versions", "changed_since_fit"),
    others=True,  # they are shown as they are
    matcher=maybe(fields(("name",), others=True, name=TEXT)),
    versions=table(ANYTHING),
    changed_since_fit=several(ANYTHING),
)


_MODEL = fields(
    (
        *("task", "source", "target", "stitch", "recipe", "scores", "requires", "processor_settings", "tied_weights"),
        *("hidden_size", "max_position_embeddings", "vocab_size"),
        *("num_hidden_layers", "num_attention_heads", "layer_types", "sliding_window"),
        *("architectures", "id2label", "label2id", "num_labels", "problem_type", "use_cache"),
        *("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "sep_token_id"),
    ),
    others=True,  # StitchConfig names those that neither it nor transformers knows
    format_version=whole(1),
    task=maybe(TEXT),
    source=maybe(_half),
    target=maybe(_half),
    stitch=maybe(STITCH),
    tied_weights=maybe(table(TEXT)),
    recipe=maybe(RECIPE),
    scores=SCORES,
    requires=maybe(several(REQUIREMENT)),
    processor_settings=maybe(fields(chosen=table(ANYTHING), defaults=table(ANYTHING))),
    hidden_size=maybe(whole(1)),
    max_position_embeddings=maybe(whole(1)),
    vocab_size=maybe(whole(1)),
    num_hidden_layers=maybe(whole(0)),
    num_attention_heads=maybe(whole(1)),
    layer_types=maybe(several(TEXT)),
    sliding_window=maybe(whole(1)),
    architectures=maybe(several(TEXT)),
    id2label=maybe(table(TEXT)),
    label2id=maybe(table(whole())),
    num_labels=maybe(whole(0)),
    problem_type=maybe(TEXT),
    use_cache=maybe(FLAG),
    bos_token_id=maybe(whole()),
    decoder_start_token_id=maybe(whole()),
    eos_token_id=maybe(lambda found, at: (several(whole()) if isinstance(found, list) else whole())(found, at)),
    pad_token_id=maybe(whole()),
    sep_token_id=maybe(whole()),
)


def _inner(found: Any, at: Place) -> Any:
    """Read the record of the stitcher of one side, if that side is a stitched model itself."""
    return maybe(_STITCHER)(found, at)


_END = fields(("stitcher",), reference=REFERENCE, layer=TEXT, stitcher=_inner)
_STITCHER: Reader = fields(
    ("task", "own", "recipe", "scores", "requires", "manifest", "checksum"),
    format_version=whole(1),
    source=_END,
    target=_END,
    stitch=STITCH,
    task=maybe(TEXT),
    own=maybe(FLAG),
    recipe=maybe(RECIPE),
    scores=SCORES,
    requires=maybe(several(REQUIREMENT)),
    manifest=ANYTHING,
    checksum=ANYTHING,
)


def read_model(record: Any, where: str) -> dict[str, Any]:
    """Check the record of a stitched model, and those of the stitched models of which its halves were cut."""
    values: dict[str, Any] = _read(_MODEL, record, where)
    if values.get("source") and values.get("target") and values.get("stitch"):
        for side in ("source", "target"):
            have, want = values["stitch"][side], values[side]["cut"]["spec"]
            if own := (values[side].get("reading") or {}).get("own"):
                want = {**want, "width": want["width"] + own[-1]}
            if have != want:
                raise (Place(where) / "stitch" / side).wrong(f"the spec of the cut of the {side}, {want}", have)
    return _with_task_of_head(values)


def _with_task_of_head(values: dict[str, Any]) -> dict[str, Any]:
    """Name the task of a head for numbers or several classes, which versions up to 0.2 recorded as classification.

    Their scores are dropped: they are accuracies of a head that has none.
    """
    if values.get("task") not in registries.tasks or not registries.tasks.get(values["task"]).classifies:
        return values
    outputs = len(values.get("id2label") or ()) or values.get("num_labels")
    if values.get("problem_type") == MULTI_LABEL:
        found = "multi-label-classification"
    elif values.get("problem_type") == REGRESSION or outputs == 1:
        found = "regression"
    else:
        return values
    recipe = values.get("recipe")
    if isinstance(recipe, Mapping):
        recipe = {key: value for key, value in recipe.items() if key != "audit"}
    return {**values, "task": found, "scores": None, "recipe": recipe}


def read_stitcher(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check the record of a stitcher."""
    values: dict[str, Any] = _read(_STITCHER, record, where)
    return values


def _read(reader: Reader, record: Any, where: str) -> Any:
    check_counts(record, where)
    SIGNATURE(record, Place(where))
    check_format(record, where)
    return reader(record, Place(where))
