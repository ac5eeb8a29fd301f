"""Figures from plain arrays and labels; matplotlib is imported for the first figure.

Every function returns a ``matplotlib.figure.Figure`` outside of pyplot and without a window. Save it with
``figure.savefig("name.png")``, or display it in a notebook.
"""

from importlib.util import find_spec

from hf_stitch.plots.charts import curves, interval_panels, intervals, strips
from hf_stitch.plots.heatmap import heatmap, heatmaps

if find_spec("matplotlib") is None:
    raise ModuleNotFoundError(
        "figures require matplotlib, which is not installed: pip install 'hf-stitch[plots]'", name="matplotlib"
    )

__all__ = ["curves", "heatmap", "heatmaps", "interval_panels", "intervals", "strips"]
