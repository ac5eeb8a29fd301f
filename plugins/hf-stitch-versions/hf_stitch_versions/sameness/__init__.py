"""Whether two networks are the same, and where they first differ."""
