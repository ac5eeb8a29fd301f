"""Figures from plain arrays and labels; matplotlib is imported when the first one is drawn.

Every function returns a ``matplotlib.figure.Figure`` that belongs to no window and no pyplot state: save it by
``figure.savefig("name.png")``, or let a notebook show it.
"""

from .curves import curves
from .evolution import evolution
from .heatmap import heatmap
from .histogram import histogram
from .intervals import intervals
from .matrices import matrices

__all__ = ["curves", "evolution", "heatmap", "histogram", "intervals", "matrices"]
