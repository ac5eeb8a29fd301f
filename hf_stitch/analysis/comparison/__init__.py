"""Comparing every layer of one side with every layer of another, in one pass over the samples."""
