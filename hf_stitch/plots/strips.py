"""Parts of networks as strips."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from hf_stitch.options import checked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Role = Literal["source", "stitch", "target", "left out"]
"""What a part of a strip is."""

COLOURS: dict[Role, str] = {"source": "#0072b2", "stitch": "#d55e00", "target": "#009e73", "left out": "#b5b5b5"}


@checked
def strips(parts: Iterable[tuple[str, str, float, Role]], label: str) -> Figure:
    """Draw rows of parts, each as long as its size; what is left out is hatched.

    Args:
        parts: Row, name, size and role of each part, from left to right.
        label: What the sizes are.

    Example:
        >>> figure = strips([("source", "front", 3.0, "source"), ("source", "back", 5.0, "left out")], "parameters")
        >>> [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
        ['source']
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawn = list(parts)
    if not drawn:
        raise ValueError("strips need at least one part, got none")
    rows = list(dict.fromkeys(row for row, *_ in drawn))
    figure = Figure(figsize=(8, 0.9 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    ends = dict.fromkeys(rows, 0.0)
    for row, _, size, role in drawn:
        hatch = "//" if role == "left out" else None
        axes.barh(
            rows.index(row), size, left=ends[row], height=0.6, color=COLOURS[role], edgecolor="white", hatch=hatch
        )
        ends[row] += size
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right", "left"]].set_visible(False)
    roles = dict.fromkeys(role for *_, role in drawn)
    figure.legend(handles=[Patch(color=COLOURS[role], label=role) for role in roles], loc="outside upper center",
                  ncols=len(roles), frameon=False)  # fmt: skip
    return figure
