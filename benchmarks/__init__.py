"""Benchmarks, reported as ratios to a baseline measured in the same run.

``python -m benchmarks`` runs all benchmarks, ``python -m benchmarks cuts`` runs one.
"""
