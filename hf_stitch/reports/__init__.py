"""Results as pages: one self-contained HTML file that opens from the disk."""

from hf_stitch.reports.page import load_report, report

__all__ = ["load_report", "report"]
