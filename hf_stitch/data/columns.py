"""Which columns of a dataset contain the samples and the labels: detection by type and name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import numpy as np
from PIL.Image import Image

Modality = Literal["image", "text", "tensor", "image and text"]
ANSWER = "answer"
"""Column of expected answers about images; networks do not receive it."""

LISTS = ("List", "LargeList", "Sequence", "list", "tuple", "ndarray", "tensor")
"""Kinds of label columns with several numbers per sample."""

NUMERIC = ("class", "integer", "float", *LISTS)
"""Kinds of columns that can be labels."""

LABELS = ("label", "labels", "target")
"""Names of columns of labels; the last one may also contain target texts."""

LISTED = 12
"""Maximal number of columns in an error message; some datasets have a hundred."""


def kind_of(value: Any) -> str:
    """Return a modality, ``integer`` (also a scalar array or tensor), ``float``, or the name of the value's type."""
    if isinstance(value, str) or (
        isinstance(value, tuple) and len(value) == 2 and all(isinstance(v, str) for v in value)
    ):
        return "text"
    if isinstance(value, Image) or (isinstance(value, list) and value and all(isinstance(v, Image) for v in value)):
        return "image"
    if isinstance(value, (int, np.integer)):
        return "integer"
    if isinstance(value, np.floating):
        return "float"
    import torch

    if isinstance(value, torch.Tensor):
        return "integer" if value.dim() == 0 and not (value.is_floating_point() or value.is_complex()) else "tensor"
    if isinstance(value, np.ndarray):
        return "integer" if value.ndim == 0 and value.dtype.kind in "iu" else "tensor"
    return type(value).__name__


def is_list_of_numbers(value: Any) -> bool:
    """Return whether a value is a label of several outputs, classes or words: numbers along one axis."""
    values = value.tolist() if getattr(value, "ndim", 0) == 1 else value
    return isinstance(values, list | tuple) and bool(values) and all(isinstance(v, int | float) for v in values)


def common_kind(values: Sequence[Any]) -> str:
    """Return the kind of all values, or a description of a mismatch, which is not a valid kind."""
    first = kind_of(values[0])
    # Elements of arrays always have the same kind.
    for index, value in enumerate(values) if isinstance(values, (list, tuple)) else ():
        if kind_of(value) != first:
            return f"{first}, but {kind_of(value)} at place {index}"
    return first


def content(sample: Any) -> bytes:
    """Return the bytes that identify a sample in memory."""
    if isinstance(sample, list) and kind_of(sample) == "image":
        return b"".join(map(content, sample))
    if isinstance(sample, Image):
        return repr((sample.mode, sample.size, sample.getpalette())).encode() + sample.tobytes()
    if kind_of(sample) == "tensor":
        import torch

        tensor = torch.as_tensor(sample).detach().cpu().contiguous()
        raw_bytes: bytes = tensor.flatten().view(torch.uint8).numpy().tobytes()
        return repr((str(tensor.dtype), tuple(tensor.shape))).encode() + raw_bytes
    return repr(sample).encode()


def feature_kind(feature: Any) -> str:
    """Return a modality, ``class``, ``integer``, ``float``, or the name of the feature's type."""
    import datasets

    if isinstance(feature, datasets.ClassLabel):
        return "class"
    if isinstance(feature, datasets.Image):
        return "image"
    if isinstance(feature, datasets.Value):
        if feature.dtype in ("string", "large_string"):
            return "text"
        if feature.dtype.startswith("float"):
            return "float"
        return "integer" if feature.dtype.startswith(("int", "uint", "bool")) else feature.dtype
    return type(feature).__name__


def listing(kinds: Mapping[str, str]) -> str:
    """Return the first :data:`LISTED` columns and their kinds, for error messages."""
    first_columns = ", ".join(f"{name!r} ({kind})" for name, kind in list(kinds.items())[:LISTED])
    return first_columns if len(kinds) <= LISTED else f"{first_columns} and {len(kinds) - LISTED} more"


def check_named(kinds: Mapping[str, str], role: str, name: str, allowed: Sequence[str]) -> None:
    """Raise an error unless a column exists and has one of the allowed kinds."""
    if name not in kinds:
        raise ValueError(f"{role}={name!r} is not a column; the columns are: {listing(kinds)}")
    if kinds[name] not in allowed:
        allowed_names = [kind for kind in allowed if kind not in LISTS] + ["lists of numbers"] * (LISTS[0] in allowed)
        raise ValueError(f"{role}={name!r} must be a column of {' or '.join(allowed_names)}, got {kinds[name]}")


def find_samples(
    kinds: Mapping[str, str], image: str | None, text: str | None, text_pair: str | None, taken: Iterable[Any]
) -> tuple[Modality, tuple[str, ...]]:
    """Return the modality and the columns of the samples: the named columns, or the only possible column."""
    if text_pair is not None and text is None:
        raise ValueError("text_pair is the column of the second texts; pass the column of the first texts as text")
    for role, name in (("image", image), ("text", text), ("text", text_pair)):
        if name is not None:
            check_named(kinds, role, name, (role,))
    if image is not None and text is not None:
        if text_pair is not None:
            raise ValueError("text_pair cannot be combined with image; remove text_pair")
        return "image and text", (image, text, *([ANSWER] if text != ANSWER and kinds.get(ANSWER) == "text" else []))
    if text is not None:
        return "text", (text,) if text_pair is None else (text, text_pair)
    if image is not None:
        has_answers = kinds.get(ANSWER) == "text"
        return ("image and text", (image, ANSWER)) if has_answers else ("image", (image,))
    candidates = {name: kind for name, kind in kinds.items() if kind in get_args(Modality) and name not in taken}
    if len(candidates) > 1:
        candidates = {name: kind for name, kind in candidates.items() if kind != "tensor" or name not in LABELS}
    if sorted(kind for name, kind in candidates.items() if name != ANSWER or len(candidates) == 2) == ["image", "text"]:
        order = sorted(candidates, key=lambda name: (candidates[name] != "image", name == ANSWER))
        return "image and text", tuple(order)
    if len(candidates) != 1:
        several = f"several columns could be the samples: {listing(candidates)}; choose one with {_choices(candidates)}"
        none = (
            f"no column contains images, texts or tensors; the columns are: {listing(kinds)}. Pass labels as label=, "
            "and remove missing samples (None)"
        )
        raise ValueError(several if candidates else none)
    [(name, kind)] = candidates.items()
    return cast(Modality, kind), (name,)


def _choices(candidates: Mapping[str, str]) -> str:
    """Return the calls that select one of several columns, in Python and on the command line."""
    named = [(kind, name) for name, kind in candidates.items() if kind in ("image", "text")]
    if not named:
        return (
            "Samples.of([row[name] for row in data]). A sample is one tensor: for networks with several input tensors "
            "(packed patches with their coordinates), pass images instead, or inputs one batch at a time, "
            "adapter.encode(inputs)"
        )
    kind, name = named[0]
    return f"Samples.of(data, {kind}={name!r}), or --{kind} {name} on the command line"


def fields_of(columns: Sequence[str]) -> tuple[str, ...]:
    """Return the keys of a sample of an image and texts."""
    return ("image", *(ANSWER if name == ANSWER else "text" for name in columns[1:]))


def find_labels(kinds: Mapping[str, str], taken: Iterable[Any]) -> list[str]:
    """Return the columns that can contain the labels; with several, the user must choose before labels are read."""
    classes = [name for name, kind in kinds.items() if kind == "class" and name not in taken]
    named = [name for name in LABELS if name in kinds and name not in taken]
    preferred = [name for name in named if name != LABELS[-1]]
    return classes or preferred or [name for name in named if kinds[name].startswith(NUMERIC)]


def unread_labels(kinds: Mapping[str, str], candidates: Sequence[str]) -> str:
    """Return the reason why labels cannot be read from candidate columns; empty if they can."""
    if len(candidates) > 1:
        return (
            f"several columns could be the labels: {', '.join(map(repr, candidates))}; choose one with "
            f"Samples.of(data, label={candidates[0]!r}), or --label {candidates[0]} on the command line"
        )
    # A label column may have gaps; reading the labels raises an error that names the sample.
    kind = kinds[candidates[0]] if candidates else "class"
    return "" if kind.startswith(NUMERIC) else no_classes(candidates[0], f"{kind} values")


def no_classes(name: str, contents: str) -> str:
    """Return the error message for labels that are not classes; ``name`` is empty for labels without a column."""
    subject = f"column {name!r} has" if name else "the labels are"
    return (
        f"{subject} {contents}, but labels must be classes, one integer per sample; pass another column, "
        "Samples.of(data, label=…), convert it (datasets' class_encode_column), or remove it"
    )
