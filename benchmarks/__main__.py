"""Run the named benchmarks, or all benchmarks without a name."""

import importlib
import sys

NAMES = [
    *("atlas", "atoms", "command_line", "cuts", "device", "generation", "gpu", "grid", "least_squares", "listing"),
    *("offload", "permutations", "plans", "relative", "same", "saving", "scaling", "task_loss"),
]

for name in sys.argv[1:] or NAMES:
    importlib.import_module(f"benchmarks.{name}").main()
