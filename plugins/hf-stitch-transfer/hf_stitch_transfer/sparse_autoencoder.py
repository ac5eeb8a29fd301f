"""Sparse autoencoders of activations in the file format of SAELens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_stitch.options import Count, checked
from hf_stitch.storage.files import decoding, load_whole, replacing

Architecture = Literal["standard", "jumprelu", "topk"]
ARCHITECTURES: tuple[str, ...] = get_args(Architecture)

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
NOT_METADATA = ("architecture", "d_in", "d_sae", "dtype", "device", "apply_b_dec_to_input", "k", "activation_fn_str")
"""Config keys that are written anew or are obsolete, so not kept as metadata."""

DISABLED: Mapping[str, tuple[Any, ...]] = {
    "normalize_activations": (None, "none"),
    "reshape_activations": (None, "none"),
    "finetuning_scaling_factor": (None, False),
    "rescale_acts_by_decoder_norm": (None, False),
}
"""Unsupported options of SAELens -> values that disable them."""


class SparseAutoencoder(nn.Module):
    """Sparse autoencoder with one hidden layer: ``decode(encode(x))`` with many sparsely active features.

    Features are ``f = act((x − b_dec) · W_enc + b_enc)``, with ``b_dec`` subtracted only if ``apply_b_dec_to_input``,
    and the reconstruction is ``f · W_dec + b_dec``. Names and shapes follow SAELens.

    Args:
        d_in: Width of the activations.
        d_sae: Number of features.
        architecture: ``standard`` (ReLU), ``jumprelu`` (ReLU above a threshold for each feature), or ``topk`` (the
            ``k`` largest).
        k: Number of active features, for ``topk`` only.
        apply_b_dec_to_input: Whether to subtract the bias of the decoder from the activations.
        dtype: Dtype of the weights.
        metadata: Further entries of the config, for example the model and the layer.

    Raises:
        ValueError: If a size is below 1, the architecture is unknown, or ``k`` does not match it.

    Example:
        >>> autoencoder = SparseAutoencoder(8, 32)
        >>> autoencoder.encode(torch.randn(5, 8)).shape, autoencoder(torch.randn(5, 8)).shape
        (torch.Size([5, 32]), torch.Size([5, 8]))
    """

    @checked
    def __init__(
        self,
        d_in: Count,
        d_sae: Count,
        architecture: Architecture = "standard",
        *,
        k: int | None = None,
        apply_b_dec_to_input: bool = False,
        dtype: torch.dtype = torch.float32,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if (k is not None) != (architecture == "topk") or (k is not None and not 1 <= k <= d_sae):
            raise ValueError(
                f"k must be from 1 to {d_sae} for architecture topk, and None otherwise, got k={k} for {architecture}"
            )
        self.architecture: Architecture = architecture
        self.k, self.apply_b_dec_to_input, self.metadata = k, apply_b_dec_to_input, dict(metadata or {})
        # With this length, random features under a ReLU approximately reconstruct the activations.
        length = min(1.0, (2 * d_in / d_sae) ** 0.5)
        decoder = (nn.functional.normalize(torch.randn(d_sae, d_in), dim=-1) * length).to(dtype)
        self.W_dec, self.W_enc = nn.Parameter(decoder), nn.Parameter(decoder.T.clone().contiguous())
        self.b_enc = nn.Parameter(torch.zeros(d_sae, dtype=dtype))
        self.b_dec = nn.Parameter(torch.zeros(d_in, dtype=dtype))
        self.threshold = nn.Parameter(torch.zeros(d_sae, dtype=dtype)) if architecture == "jumprelu" else None

    @property
    def d_in(self) -> int:
        """Width of the activations."""
        return self.W_enc.shape[0]

    @property
    def d_sae(self) -> int:
        """Number of features."""
        return self.W_enc.shape[1]

    def encode(self, x: Tensor) -> Tensor:
        """Compute the features of activations.

        Args:
            x: (…, d_in).

        Returns:
            (…, d_sae), at least 0.
        """
        hidden = (x - self.b_dec if self.apply_b_dec_to_input else x) @ self.W_enc + self.b_enc
        if self.k is not None:
            activations, indices = hidden.topk(self.k, dim=-1)
            return torch.zeros_like(hidden).scatter(-1, indices, activations.relu())
        active = hidden.relu()
        return active if self.threshold is None else active * (hidden > self.threshold)

    def decode(self, features: Tensor) -> Tensor:
        """Compute activations from features.

        Args:
            features: (…, d_sae).

        Returns:
            (…, d_in).
        """
        return features @ self.W_dec + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        """Reconstruct activations.

        Args:
            x: (…, d_in).

        Returns:
            (…, d_in).
        """
        return self.decode(self.encode(x))

    # -- files ------------------------------------------------------------------------------------------------------
    @classmethod
    def from_saelens(cls, folder: str | Path) -> Self:
        """Load an autoencoder saved by SAELens or by :meth:`save_saelens`.

        Args:
            folder: The folder with ``cfg.json`` and ``sae_weights.safetensors``.

        Returns:
            The autoencoder, in the dtype of its weights, in eval mode.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If a file is damaged, the files do not match, the architecture is not supported (gated,
                transcoders), or activations are normalised, which depends on the data.
        """
        where = Path(folder)
        # Retry if the files are replaced during the read; report errors of decoders as damaged files.
        return load_whole(where, CONFIG, decoding(where)(lambda: cls._read(where)))

    @classmethod
    def _read(cls, folder: Path) -> Self:
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} must contain {name}: pass the folder of an autoencoder of SAELens")
        config = json.loads((folder / CONFIG).read_bytes())
        weights = load_file(folder / WEIGHTS)
        architecture, k = _architecture(config, folder)
        for key, disabling_values in DISABLED.items():
            if config.get(key) not in disabling_values:
                raise ValueError(f"{key}={config[key]!r} of the autoencoder in {folder} is not supported")
        encoder = weights.get("W_enc")
        if encoder is None or encoder.ndim != 2:
            raise ValueError(f"{folder / WEIGHTS} must contain a matrix W_enc, got {', '.join(sorted(weights))}")
        metadata = {key: value for key, value in config.items() if key not in NOT_METADATA}
        autoencoder = cls(
            encoder.shape[0], encoder.shape[1], architecture, k=k, dtype=encoder.dtype, metadata=metadata,
            apply_b_dec_to_input=bool(config.get("apply_b_dec_to_input", False)),
        )  # fmt: skip
        try:
            autoencoder.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"{folder / WEIGHTS} does not match a {architecture} autoencoder: {error}") from error
        return autoencoder.eval()

    def save_saelens(self, folder: str | Path) -> None:
        """Save in the format of SAELens (``SAE.load_from_disk``).

        Args:
            folder: The folder, created if needed.

        Raises:
            OSError: If a file cannot be written. The previous files then stay unchanged.
        """
        config = {
            **self.metadata, "architecture": self.architecture, "d_in": self.d_in, "d_sae": self.d_sae,
            "dtype": str(self.W_enc.dtype).removeprefix("torch."), "device": "cpu",
            "apply_b_dec_to_input": self.apply_b_dec_to_input, **({"k": self.k} if self.k else {}),
        }  # fmt: skip
        with replacing(Path(folder)) as fresh:
            (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            save_file({name: weight.contiguous() for name, weight in self.state_dict().items()}, fresh / WEIGHTS)


def _architecture(config: Any, folder: Path) -> tuple[Architecture, int | None]:
    """Return the architecture and the number of active features from a config; old configs name the activation."""
    if not isinstance(config, dict):
        raise ValueError(f"{folder / CONFIG} must contain a JSON object, got {type(config).__name__}")
    name = config.get("architecture", "standard")
    activation = config.get("activation_fn_str", config.get("activation_fn", "relu"))
    if name == "standard" and activation == "topk":
        return "topk", (config.get("activation_fn_kwargs") or {}).get("k")
    if name not in ARCHITECTURES or (name == "standard" and activation != "relu"):
        raise ValueError(
            f"the autoencoder in {folder} is a {name} autoencoder with activation {activation!r}; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return name, config.get("k") if name == "topk" else None
