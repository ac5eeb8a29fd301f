"""A network with another tower as an ordinary folder, with a card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_stitch.storage.files import replacing
from hf_stitch_towers.result import GONE, worded

if TYPE_CHECKING:
    from hf_stitch_towers.result import Exchanged

CARD = """---
library_name: transformers
tags: [hf-stitch, tower-exchange]
---
# Another {part} tower

{network} with {encoder} as its {part} tower, exchanged by [hf-stitch](https://pypi.org/project/hf-stitch/) without
training: a map ({matcher}) was fitted on {fitted} images without labels.

{verdict}

| row | {figures} |
|---|{rules}|
{rows}

Outputs are compared with those of the original on {n} test images; 95% intervals over images.

{notes}
"""


END = "\n---\n"
"""What follows the part of a card that the Hub reads."""


def save(result: Exchanged, folder: Path) -> None:
    """Save the network of a result; see :meth:`Exchanged.save_pretrained`."""
    if result.model is None:
        raise ValueError(GONE)
    with replacing(folder, _stale) as fresh:
        result.model.save_pretrained(fresh)
        text = card(result)
        if not result.folded:  # which has a card; the scores go behind what the Hub reads
            text = f"{(fresh / 'README.md').read_text(encoding='utf-8')}\n{text.partition(END)[2]}"
        if result.processor is not None and (result.folded or result.processor is not result.model.processor):
            result.processor.save_pretrained(fresh)
        (fresh / "README.md").write_text(text, encoding="utf-8")


def _stale(folder: Path) -> list[str]:
    """Return the files of an earlier save that a new one may not replace, and that would be read."""
    patterns = ("*.safetensors*", "pytorch_model*", "*processor_config.json", "tokenizer*", "chat_template*")
    return [path.name for pattern in patterns for path in folder.glob(pattern)]


def card(result: Exchanged) -> str:
    """Return the card of a network with another tower."""
    rows = [
        f"| {who} | " + " | ".join(str(row[name]) for name in result.figures) + " |"
        for who, row in result.scores.items()
    ]
    return CARD.format(
        part=result.part, network=result.network, encoder=result.encoder, matcher=result.matcher, fitted=result.fitted,
        verdict=result.verdict, figures=" | ".join(map(worded, result.figures)),
        rules="|".join("---" for _ in result.figures),
        rows="\n".join(rows), n=result.n, notes="\n".join(f"- {note}" for note in result.notes),
    )  # fmt: skip
