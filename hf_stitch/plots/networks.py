"""Dendrograms and maps of objects by their distances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def dendrogram(distances: ArrayLike, labels: Sequence[str], *, label: str = "") -> Figure:
    """Draw a dendrogram by average linkage.

    Args:
        distances: (n, n) symmetric distances, 0 on the diagonal.
        labels: Names of the objects.
        label: Label of the axis of distances (default: none).

    Returns:
        The figure.

    Raises:
        ValueError: If the distances are not symmetric, or do not match the labels.

    Example:
        >>> figure = dendrogram([[0, 1, 4], [1, 0, 4], [4, 4, 0]], ["a", "b", "c"])
        >>> [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
        ['c', 'a', 'b']
    """
    from matplotlib.figure import Figure
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    matrix = _checked(distances, labels)
    figure = Figure(figsize=(5, max(0.35 * len(labels) + 1.0, 2.2)), layout="constrained")
    axes = figure.add_subplot()
    tree = hierarchy.linkage(squareform(matrix, checks=False), "average")
    hierarchy.dendrogram(
        tree, labels=list(labels), orientation="left", ax=axes, color_threshold=0, above_threshold_color="black"
    )
    axes.set_xlabel(label)
    axes.spines[["top", "left", "right"]].set_visible(False)
    return figure


def distance_map(distances: ArrayLike, labels: Sequence[str], *, label: str = "") -> Figure:
    """Draw objects as points in the plane whose distances approximate the given ones.

    This is classical scaling (Torgerson 1952).

    Args:
        distances: (n, n) symmetric distances, 0 on the diagonal.
        labels: Names of the objects.
        label: What the distances are (default: none).

    Returns:
        The figure. The label of its axis contains the share of the squared distances that the plane shows.

    Raises:
        ValueError: If the distances are not symmetric, or do not match the labels.

    Example:
        >>> figure = distance_map([[0, 3, 5], [3, 0, 4], [5, 4, 0]], ["a", "b", "c"], label="distance")
        >>> figure.axes[0].get_xlabel()
        'distance (100% of its squares lie in the plane)'
    """
    from matplotlib.figure import Figure

    matrix = _checked(distances, labels)
    centre = np.eye(len(matrix)) - 1 / len(matrix)
    values, vectors = np.linalg.eigh(-centre @ matrix**2 @ centre / 2)
    points = vectors[:, -2:][:, ::-1] * np.sqrt(np.maximum(values[-2:][::-1], 0))
    total = np.abs(values).sum()
    shown = values[-2:].clip(0).sum() / total if total else 1.0
    figure = Figure(figsize=(5, 4.4), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(points[:, 0], points[:, 1], color="black", s=18)
    for name, point in zip(labels, points, strict=True):
        axes.annotate(name, tuple(point), xytext=(4, 4), textcoords="offset points")
    axes.set_aspect("equal", "datalim")
    axes.margins(0.12)
    axes.set_xlabel(f"{label} ({shown:.0%} of its squares lie in the plane)")
    return figure


def _checked(distances: ArrayLike, labels: Sequence[str]) -> NDArray[np.float64]:
    matrix = np.asarray(distances, np.float64)
    if matrix.shape != (len(labels), len(labels)) or len(labels) < 2:
        raise ValueError(f"distances must be (n, n) for n = {len(labels)} >= 2 labels, got the shape {matrix.shape}")
    if not np.isfinite(matrix).all() or not np.allclose(matrix, matrix.T):
        raise ValueError("distances must be finite and symmetric")
    return matrix
