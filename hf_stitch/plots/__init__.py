"""Figures from plain arrays and labels; matplotlib is imported when the first one is drawn.

Every function returns a ``matplotlib.figure.Figure`` that belongs to no window and no pyplot state: save it by
``figure.savefig("name.png")``, or let a notebook show it.
"""

from hf_stitch.plots.curves import curves
from hf_stitch.plots.evolution import evolution
from hf_stitch.plots.heatmap import heatmap
from hf_stitch.plots.histogram import histogram
from hf_stitch.plots.intervals import intervals
from hf_stitch.plots.matrices import matrices

__all__ = ["curves", "evolution", "heatmap", "histogram", "intervals", "matrices"]
