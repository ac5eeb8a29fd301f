"""Test whether two networks are the same: :func:`same`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

from safetensors import safe_open
from torch import nn

from hf_stitch import Activations, Adapter, Samples, load
from hf_stitch.adapters import load_on
from hf_stitch.adapters.examples import ExampleError
from hf_stitch.data import Data
from hf_stitch.options import Positive, checked
from hf_stitch.printing import warn
from hf_stitch.running import WITHOUT_STATE, Run, RunOptions
from hf_stitch_versions.ports.port import SECONDS
from hf_stitch_versions.ports.prefixes import opened, prefixed
from hf_stitch_versions.sameness.comparison import Comparison
from hf_stitch_versions.sameness.result import Sameness
from hf_stitch_versions.sources import Recorded, Source, in_memory

BATCH = 8
"""Samples per forward pass; the outputs of all modules are in memory at the same time."""


@checked
def same(
    a: str | nn.Module | Adapter, b: str | Path | nn.Module | Adapter | Activations, data: Data | None = None, *,
    tolerance: Positive = 4.0, python: Mapping[str, str] | None = None, trust: bool = False,
    seconds: Positive = SECONDS, **options: Unpack[RunOptions],
) -> Sameness:  # fmt: skip
    """Test whether two networks are the same, and find where they first differ.

    The first network, computed in float64, is the reference. The null of a module is the effect of rounding on its
    output: in float32, or in the coarser dtype if the networks have different dtypes. The second network is also
    computed in float64 if it can run here. The search starts at the first module that differs by more than
    ``tolerance`` times its null. If its inputs differ as well, the module that calls it is the cause. The output of
    the cause is then replaced by the output of the reference, and the search continues.

    Args:
        a: The first network: an adapter, a module, or a name for :func:`hf_stitch.load`.
        b: The second network, as ``a``. Also a module that accepts the inputs of the first network, a module from
            ``torch.compile``, an exported file (``….onnx``), or recorded activations under the layer names of the first
            network (:class:`hf_stitch.Activations`, or a file of them). Also a network in another runtime:
            ``"mlx:./folder"``, ``"openvino:model.xml"``, ``"keras:./folder"``, ``"ctranslate2:./folder"`` or
            ``"gguf:model.gguf"``.
        data: Raw samples; a few dozen suffice. Default: random inputs within the bounds of the first network, of
            several lengths, padded on both sides.
        tolerance: A module differs if it exceeds this multiple of its null.
        python: Runtime -> interpreter of the environment in which it is installed; default: the running interpreter.
        trust: Whether code in the file of another runtime may run: a ``model_file`` of MLX, or a Lambda layer of Keras.
        seconds: Time limit of another runtime for loading, and for each batch.
        **options: Options of the run: ``batch_size`` (default 8), ``seed`` (of random inputs), ``progress`` and
            ``accelerator``, as in :class:`hf_stitch.running.RunOptions`. Processes share the samples.

    Returns:
        The verdict, the modules that differ, and a table of all modules.

    Raises:
        ValueError: If the networks have different widths (then use :func:`hf_stitch.compare`), the second network does
            not run on the inputs of the first, recorded activations do not match the samples or the layers, or a
            runtime is unknown or refuses the network.
        ImportError: If the runtime of the second network is not installed.
        PortError: If the process of another runtime dies before the networks are paired.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import LayerNorm, Linear, Sequential
        >>> net = Sequential(Linear(4, 8), LayerNorm(8), Linear(8, 2))
        >>> port = Sequential(Linear(4, 8), LayerNorm(8, eps=1e-3), Linear(8, 2))
        >>> _ = port.load_state_dict(net.state_dict())
        >>> a, b = (hf_stitch.load(model, example_inputs=torch.randn(2, 4)) for model in (net, port))
        >>> sameness = same(a, b, torch.randn(20, 4), progress=False)
        >>> sameness.is_same, sameness.findings[0].module, sameness.findings[0].settings
        (False, '1', ('eps 1e-05 against 0.001',))
        >>> same(a, a).is_same
        True
    """
    options.setdefault("batch_size", BATCH)
    if prefixed(a) is not None:
        raise ValueError(f"expected a network in torch as the first network, the reference; pass {a!r} as the second")
    with Run.of(same, options, takes=WITHOUT_STATE) as run:
        first = in_memory(load_on(a, run.processes.device))
        port = prefixed(b)
        if port is None:
            second = _source(b, first, run)
        else:
            second = opened(port[0], Path(port[1]), first, python or {}, trust, seconds)
        second = in_memory(second) if isinstance(second, Adapter) else second
        samples = None if data is None else Samples.of(data)
        code = b if isinstance(b, nn.Module) and hasattr(b, "_orig_mod") else None
        return Comparison(first, second, samples, tolerance, run, code).answer()


class DifferentError(AssertionError):
    """Two networks are not the same.

    Attributes:
        report: The result of :func:`same`.
    """

    def __init__(self, report: Sameness) -> None:
        super().__init__(report.verdict)
        self.report = report


def assert_same(
    a: str | nn.Module | Adapter, b: str | Path | nn.Module | Adapter | Activations, data: Data | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Raise an error if two networks are not the same, for a test suite.

    Args:
        a: The first network, as in :func:`same`.
        b: The second network, as in :func:`same`.
        data: Raw samples; default: random inputs.
        **options: Options of :func:`same`.

    Raises:
        DifferentError: If they differ. Its message is the verdict, and its attribute ``report`` the result.

    Example:
        >>> import torch, hf_stitch
        >>> net, port = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> a, b = (hf_stitch.load(model, example_inputs=torch.randn(2, 4)) for model in (net, port))
        >>> assert_same(a, a)
        >>> try:
        ...     assert_same(a, b)
        ... except DifferentError as error:
        ...     print(error.report.is_same)
        False
    """
    report = same(a, b, data, **{"progress": False, **options})
    if not report.is_same:
        raise DifferentError(report)


def _source(b: Any, first: Adapter, run: Run) -> Adapter | Source:
    """Return the second network, or the source that reads its file."""
    place = Path(b) if isinstance(b, (str, Path)) else None
    if place is not None and place.suffix == ".onnx":
        from hf_stitch_versions.sameness.exports import Onnx

        return Onnx(place)
    if place is not None and place.suffix in (".npz", ".safetensors"):
        return Recorded(Activations.load(place))
    if isinstance(b, Activations):
        return Recorded(b)
    if isinstance(b, nn.Module):
        with suppress(ExampleError):  # user code accepts the inputs of the first network
            return load(b)
        return load(b, example_inputs=dict(first.example), processor=first.processor)
    second = load_on(str(b) if isinstance(b, Path) else b, run.processes.device)
    if place is not None and place.is_dir() and (weights := sorted(place.glob("*.safetensors"))):
        with safe_open(weights[0], "pt") as file:
            if (file.metadata() or {}).get("format") == "mlx":
                warn(f"transformers runs the network in {place}, which MLX wrote; to run it in MLX, pass mlx:{place}")
    return second
