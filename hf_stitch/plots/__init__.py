"""Figures from plain arrays and labels; matplotlib is imported when the first figure is drawn.

Every function returns a ``matplotlib.figure.Figure`` outside of pyplot and without a window. Save it with
``figure.savefig("name.png")``, or display it in a notebook.
"""

from hf_stitch.plots.curves import curves
from hf_stitch.plots.evolution import evolution
from hf_stitch.plots.heatmap import heatmap
from hf_stitch.plots.histogram import histogram
from hf_stitch.plots.intervals import intervals
from hf_stitch.plots.matrices import matrices

__all__ = ["curves", "evolution", "heatmap", "histogram", "intervals", "matrices"]
