"""Save a shortened network as an ordinary folder, with a card for the Hub."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hf_stitch import Adapter
from hf_stitch.storage.files import replacing
from hf_stitch_shorten.plain import SENTENCES, sentence_transformer


def save_network(network: Adapter | None, folder: Path, card: str) -> None:
    """Save a network in the format of its library, with a card; see :meth:`Shortened.save_pretrained`."""
    if network is None:
        raise ValueError("this result was loaded from a file, which does not contain the network: run the job again")
    if network.library == "torch":
        raise ValueError(
            f"{type(network.model).__name__} is a custom module without save_pretrained: use "
            "torch.save(result.model.model.state_dict(), path)"
        )
    if network.library == SENTENCES:
        _save_whole(network, folder, card)
        return
    with replacing(folder, _weights) as fresh:
        model: Any = network.model
        if network.library == "timm":
            import timm

            arguments = network.blueprint()["arguments"]
            timm.models.save_for_hf(model, str(fresh), model_args=arguments, safe_serialization=True)
        else:
            model.save_pretrained(fresh)
            if network.processor is not None:
                network.processor.save_pretrained(fresh)
        (fresh / "README.md").write_text(card, encoding="utf-8")


def _weights(folder: Path) -> list[str]:
    """Return the weight files in a folder: files of an earlier save may be sharded differently and be read first."""
    return [path.name for pattern in ("model*.safetensors*", "pytorch_model*") for path in folder.glob(pattern)]


def _save_whole(network: Adapter, folder: Path, card: str) -> None:
    """Save a sentence encoder with its subfolders, atomically."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"sentence encoders, which have subfolders, must be saved to an empty folder, got {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        sentence_transformer(network.model).save_pretrained(str(fresh), create_model_card=False)
        (fresh / "README.md").write_text(card, encoding="utf-8")
        fresh.chmod(0o755)
        fresh.replace(folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def front_matter(network: Adapter | None, source: str) -> str:
    """Return the metadata of a card for the Hub."""
    libraries = {"timm": "timm", SENTENCES: "sentence-transformers"}
    library = "" if network is None else network.library
    metadata: dict[str, Any] = {
        "library_name": libraries.get(library, "transformers"),
        "tags": ["hf-stitch", "shortened"],
    }
    if not Path(source).exists() and "/" in source and " " not in source:
        metadata["base_model"] = source.partition("@")[0]
    return "\n".join(("---", *(f"{key}: {json.dumps(value)}" for key, value in metadata.items()), "---", ""))
