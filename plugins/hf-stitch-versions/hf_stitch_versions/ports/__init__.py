"""Networks in other runtimes: each runs in a process of its own, and is a source of values like a network in memory."""
