"""Failure detection: living ranks, stalled operations, and mismatched calls."""
