"""Plot of the magnitudes of matrices as images, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def matrices(weights: Mapping[str, ArrayLike], *, label: str = "|weight|") -> Figure:
    """Plot the magnitudes of the entries of matrices on one colour scale (as Csiszárik et al. 2021, fig. 8, left).

    Args:
        weights: Name -> (rows, columns) finite numbers.
        label: Label of the colour bar.

    Returns:
        The figure, with one axes per matrix, followed by the axes of the colour bar; zero is white.

    Raises:
        ValueError: If ``weights`` is empty, or contains anything but matrices of finite numbers.

    Example:
        >>> figure = matrices({"identity": [[1.0, 0.0], [0.0, -1.0]]})
        >>> figure.axes[0].images[0].get_array().tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    magnitudes = {name: np.abs(np.asarray(weight, np.float64)) for name, weight in weights.items()}
    if not magnitudes:
        raise ValueError("weights must contain at least one matrix, got none")
    for name, magnitude in magnitudes.items():
        if magnitude.ndim != 2 or not magnitude.size or not np.isfinite(magnitude).all():
            raise ValueError(
                f"{name!r} must be a matrix of finite numbers, got the shape {magnitude.shape}"
                f"{'' if np.isfinite(magnitude).all() else ' with NaN or infinity'}"
            )
    norm = Normalize(0.0, max(float(magnitude.max()) for magnitude in magnitudes.values()) or 1.0)
    figure = Figure(figsize=(2.6 * len(magnitudes) + 0.9, 3.0), layout="constrained")
    panels = figure.subplots(1, len(magnitudes), squeeze=False)[0]
    for axes, (name, magnitude) in zip(panels, magnitudes.items(), strict=True):
        image = axes.imshow(magnitude, cmap="Blues", norm=norm, interpolation="nearest")
        axes.set_title(name, fontsize="medium")
        axes.set_xticks([])
        axes.set_yticks([])
    figure.colorbar(image, ax=list(panels), label=label).outline.set_visible(False)
    return figure
