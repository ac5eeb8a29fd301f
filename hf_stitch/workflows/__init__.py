"""Workflows: functions from networks (or their names) and raw samples to a result."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
