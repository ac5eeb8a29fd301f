"""Measure, save and load the covariance of the input patches of each convolution of a network."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_stitch.storage.files import decoding, write_whole

FORMAT = "hf-stitch-filter-atoms patch covariance 1"
ROWS = 2**22
"""Maximum number of patch entries per unfold operation."""


@dataclass(frozen=True)
class PatchCovariance:
    """Uncentred covariance ``C = E[p pᵀ]`` of the input patches p of the convolutions of one network.

    The mean is over images and positions. The inner product ``⟨W, W′⟩_C = tr(W C W′ᵀ)`` of two weights is then the mean
    inner product of the outputs of both convolutions on these inputs. The covariance is measured once. Its size is the
    square of the patch size: 85 MB for 3×3 patches of 512 channels.

    Attributes:
        factors: Layer -> lower triangular L with ``C = L Lᵀ``, ``(groups, size, size)`` with ``size = in / groups · kh
            · kw``, float32 on the CPU.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3))
        >>> measured = PatchCovariance.of(net, [torch.randn(4, 3, 8, 8)])
        >>> measured.factors["0"].shape
        torch.Size([1, 27, 27])
    """

    factors: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, data: Iterable[Any]) -> PatchCovariance:
        """Measure the covariance of the patches of a network.

        Patches are taken from the inputs of each convolution, including its padding.

        Args:
            model: The reference network, plain or atomized. It runs in evaluation mode, and is not modified.
            data: Batches of inputs: tensors, sequences with a tensor as first element, or mappings from argument names
                to inputs.

        Returns:
            The covariance of each ``nn.Conv2d`` that runs.

        Raises:
            TypeError: If a batch has a different type.
            ValueError: If ``data`` is empty, no convolution runs, or inputs of a convolution are not finite.
        """
        recorder = _Recorder()
        with _in_evaluation(model), recorder.tracking(model), torch.no_grad(), recorder:
            for batch in data:
                _run(model, batch)
        if not recorder.sums:
            raise ValueError("no patches: data is empty, or the network does not run an nn.Conv2d")
        for name, total in recorder.sums.items():
            if not total.isfinite().all():
                raise ValueError(f"the inputs of layer {name!r} contain NaN or infinity; check data and weights")
        return cls({name: _factor(total / recorder.counts[name]) for name, total in recorder.sums.items()})

    @property
    def key(self) -> str:
        """Hash of the covariance."""
        digest = hashlib.sha256()
        for name, factor in self.factors.items():
            digest.update(f"{name} {tuple(factor.shape)}".encode())
            digest.update(factor.contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Save to a safetensors file.

        Args:
            path: The file, written atomically.
        """
        from safetensors.torch import save_file

        tensors = {name: factor.contiguous() for name, factor in self.factors.items()}
        metadata = {"contents": FORMAT, "layers": "\n".join(self.factors)}
        write_whole(Path(path), lambda temporary: save_file(tensors, temporary, metadata=metadata))

    @classmethod
    def load(cls, path: str | Path) -> PatchCovariance:
        """Load a covariance from :meth:`save`.

        Args:
            path: The file.

        Returns:
            The covariance.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If the file does not contain a covariance.
        """
        from safetensors import safe_open

        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} does not exist; PatchCovariance.save writes such a file")
        with decoding(path), safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("contents") != FORMAT:
                raise ValueError(f"{path} must be a file from PatchCovariance.save")
            return cls({name: file.get_tensor(name) for name in metadata["layers"].split("\n")})


def load_cached(path: str) -> tuple[PatchCovariance, str]:
    """Load a covariance and its key; the last file is cached.

    Args:
        path: A file from :meth:`PatchCovariance.save`.

    Returns:
        The covariance and its key.
    """
    modified_ns = Path(path).stat().st_mtime_ns if Path(path).is_file() else 0
    return _load_cached(path, modified_ns)


@lru_cache(maxsize=1)
def _load_cached(path: str, modified_ns: int) -> tuple[PatchCovariance, str]:
    del modified_ns  # part of the cache key only
    covariance = PatchCovariance.load(path)
    return covariance, covariance.key


class _Recorder(TorchFunctionMode):
    """Recorder that sums patch products over calls of ``conv2d`` in a convolution, after padding."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self._running: list[str] = []

    @contextmanager
    def tracking(self, model: nn.Module) -> Iterator[None]:
        """Track the running convolution."""
        handles = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv2d):
                handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)))
                handles.append(module.register_forward_hook(lambda *_: self._running.pop() and None))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.conv2d and self._running:
            self._add(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> None:  # fmt: skip
        name, kernel, dilation = self._running[-1], weight.shape[-2:], nn.modules.utils._pair(dilation)
        if isinstance(padding, str):
            totals = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
            rows, columns = totals
            x, padding = F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)), 0
        x = x if x.ndim == 4 else x[None]
        chunk_size = max(1, ROWS // (x[0].numel() * kernel.numel()))
        for chunk in x.split(chunk_size):
            patches = F.unfold(chunk, kernel, dilation, padding, stride).double()
            rows = patches.unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(2)
            product = (rows @ rows.mT).cpu()
            self.sums[name] = self.sums[name].add_(product) if name in self.sums else product
            self.counts[name] = self.counts.get(name, 0) + rows.shape[2]


def _run(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, Tensor):
        model(batch)
    elif isinstance(batch, Sequence) and batch and isinstance(batch[0], Tensor):
        model(batch[0])
    else:
        raise TypeError(f"a batch must be a tensor, a sequence starting with a tensor, or a mapping, got {type(batch)}")


def _factor(covariance: Tensor) -> Tensor:
    """Return Cholesky factors, with 10⁻⁹ of the mean variance added to the diagonal."""
    variance = covariance.diagonal(dim1=1, dim2=2)
    variance.add_(1e-9 * variance.mean(1, keepdim=True))
    empty = ~covariance.flatten(1).any(1)
    variance[empty] = 1
    factors = torch.linalg.cholesky(covariance)
    factors[empty] = 0
    return factors.float()


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, is_training in training.items():
            module.training = is_training
