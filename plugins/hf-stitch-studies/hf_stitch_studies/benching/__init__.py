"""Bench of metrics: does a distance between representations predict how much they differ in function?"""
