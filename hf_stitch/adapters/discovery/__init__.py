"""Search for the cuts of a network in a traced forward, and their verification."""
