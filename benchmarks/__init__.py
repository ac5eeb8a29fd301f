"""Benchmarks: ratios against a baseline in the same run.

``python -m benchmarks`` runs all, ``python -m benchmarks cuts`` one.
"""
