"""Test whether two networks are the same, and find where they first differ."""
