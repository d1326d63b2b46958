"""Failure detection: dead or silent ranks, stalled operations, and mismatched calls."""
