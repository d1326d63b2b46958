"""Calls that travel together: what they are, how they lie in memory, and how they are packed."""
