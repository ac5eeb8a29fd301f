"""Bench of similarities: does a distance between representations predict their functional difference?"""
