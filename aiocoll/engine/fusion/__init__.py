"""Calls that are fused: what they are, their layout in memory, and how they are packed."""
