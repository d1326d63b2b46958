"""Fusion of calls: their completions, their layout in memory, and packing."""
