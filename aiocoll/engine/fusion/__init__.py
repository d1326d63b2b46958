"""Fusion of several calls into one operation: completions, memory layout and packing."""
