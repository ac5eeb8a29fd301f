"""Results as pages: one self-contained HTML file that opens from the disk."""

from hf_stitch.reports.reading import load_report
from hf_stitch.reports.writing import report

__all__ = ["load_report", "report"]
