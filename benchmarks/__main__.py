"""Run benchmarks by name; without a name, all of them."""

import importlib
import sys

NAMES = ("atlas", "cuts", "least_squares", "relative", "task_loss")

for name in sys.argv[1:] or NAMES:
    importlib.import_module(f"benchmarks.{name}").main()
