"""The small artefact: a stitch and the names of the two networks that it joins."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..adapters import Adapter, load
from ..endpoint import Endpoint
from ..registry import UnknownNameError
from ..stitches import StitchingLayer

if TYPE_CHECKING:
    from torch import nn

    from .modeling import StitchedModel

CONFIG = "stitcher.json"
WEIGHTS = "stitch.safetensors"
FORMAT = 1


class Stitcher:
    """A stitching layer, where it belongs, how it was found, how well it does: kilobytes beside parents of gigabytes.

    Attributes:
        stitch: The stitching layer.
        source: The network that gives the front half, pinned by revision and by the hash of its weights.
        source_layer: Its cut.
        target: The network that gives the back half, pinned likewise.
        target_layer: Its cut.
        task: Which head the stitched model has.
        recipe: How the stitch was found: matcher, rows, data, split, seed, versions.
        scores: What was measured on held-out samples.

    Example:
        >>> import tempfile, torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 8), ReLU(), Linear(8, 2)) for _ in range(2)]
        >>> a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
        >>> stitched = hf_stitch.stitch(a, "1", b, "1", data=torch.randn(200, 4), task=None)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stitched.stitcher.save_pretrained(folder)
        ...     again = hf_stitch.Stitcher.from_pretrained(folder).attach(a, b)
        >>> x = torch.randn(3, 4)
        >>> torch.equal(again(input=x), stitched(input=x))
        True
    """

    def __init__(
        self,
        stitch: StitchingLayer,
        source: Endpoint,
        source_layer: str,
        target: Endpoint,
        target_layer: str,
        *,
        task: str | None = None,
        recipe: Mapping[str, Any] | None = None,
        scores: Mapping[str, Any] | None = None,
    ) -> None:
        """Put the parts together."""
        self.stitch = stitch
        self.source, self.source_layer = source, source_layer
        self.target, self.target_layer = target, target_layer
        self.task = task
        self.recipe, self.scores = dict(recipe or {}), dict(scores or {})

    def __repr__(self) -> str:
        """For example ``Stitcher(timm:resnet18 layer2.1 -> timm:resnet18 layer2.1)``."""
        return f"Stitcher({self.source} {self.source_layer} -> {self.target} {self.target_layer})"

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write ``stitcher.json`` and ``stitch.safetensors`` to a folder, created if needed."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.stitch.state_dict().items()}, folder / WEIGHTS)
        config = {
            "format": FORMAT,
            "source": {"endpoint": self.source.to_dict(), "layer": self.source_layer},
            "target": {"endpoint": self.target.to_dict(), "layer": self.target_layer},
            "stitch": self.stitch.to_dict(),
            "task": self.task,
            "recipe": self.recipe,
            "scores": self.scores,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Read a stitcher from a folder, strictly.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If a file is damaged, or config and weights disagree.
        """
        folder = Path(folder)
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} has no {name}: it is no saved stitcher, or an incomplete one")
        try:
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            if config["format"] != FORMAT:
                raise ValueError(
                    f"{folder / CONFIG} has format {config['format']}, and this version reads {FORMAT}; a newer one "
                    "may read it"
                )
            stitch = StitchingLayer.from_dict(config["stitch"])
            ends = {
                side: (Endpoint.from_dict(config[side]["endpoint"]), config[side]["layer"])
                for side in ("source", "target")
            }
        except UnknownNameError:  # what it names is missing here, a plugin perhaps
            raise
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{folder / CONFIG} is damaged ({type(error).__name__}: {error}); save or download it again"
            ) from error
        try:
            weights = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
        except SafetensorError as error:
            raise ValueError(f"{folder / WEIGHTS} cannot be read ({error}); save or download it again") from error
        try:
            stitch.load_state_dict(weights, strict=True, assign=True)
        except RuntimeError as error:
            raise ValueError(f"{folder / WEIGHTS} and {CONFIG} disagree: {error}") from error
        found = {key: config.get(key) for key in ("task", "recipe", "scores")}
        return cls(stitch.eval(), *ends["source"], *ends["target"], **found)

    def attach(
        self,
        source: str | nn.Module | Adapter | None = None,
        target: str | nn.Module | Adapter | None = None,
        **options: Any,
    ) -> StitchedModel:
        """The runnable model: both parents cut, with this stitch between.

        Args:
            source: The source network, live or by name; default: the one that the stitcher names, at its revision.
            target: The target network likewise.
            **options: Passed on to :func:`hf_stitch.load` for parents given by name.

        Returns:
            The stitched model.

        Raises:
            ValueError: If a parent has other weights than those that the stitch was fitted to, or must be given and is
                not.
        """
        from .joining import join

        parents = [
            self._parent(side, given, endpoint, options)
            for side, given, endpoint in (("source", source, self.source), ("target", target, self.target))
        ]
        stitched = join(
            parents[0],
            self.source_layer,
            copy.deepcopy(self.stitch),
            parents[1],
            self.target_layer,
            task=self.task,
            recipe=self.recipe,
        )
        stitched.config.scores = self.scores
        return stitched

    def _parent(self, side: str, given: Any, endpoint: Endpoint, options: Mapping[str, Any]) -> Adapter:
        if given is None:
            if endpoint.id is None:
                raise ValueError(f"the {side} was a live module or in a local folder: pass it, as in attach({side}=…)")
            given = str(endpoint)
            options = {**endpoint.kwargs, **options}
        adapter = load(given, task=endpoint.task, **(options if isinstance(given, str) else {}))
        found = adapter.pinned.weights_hash
        if endpoint.weights_hash is not None and found != endpoint.weights_hash:
            raise ValueError(
                f"the {side} {endpoint} has other weights than the stitch was fitted to (hash {found}, expected "
                f"{endpoint.weights_hash}); attach the network of that revision, or fit a new stitch"
            )
        return adapter
