"""Separate runs of the parts of a network before and after a cut."""
