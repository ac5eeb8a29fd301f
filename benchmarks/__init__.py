"""Benchmarks, reported as ratios to a baseline measured in the same run.

``python -m benchmarks`` runs all benchmarks, ``python -m benchmarks cuts`` runs one. The benchmarks of a plugin are in
its folder ``benchmarks``, and run in the same way: ``python -m benchmarks same``.
"""

from pathlib import Path

__path__ += map(str, sorted(Path(__file__).parents[1].glob("plugins/*/benchmarks")))
