"""Results as self-contained HTML pages."""

from hf_stitch.reports.page import load_report, report

__all__ = ["load_report", "report"]
