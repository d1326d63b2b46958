"""Interceptors, which take the calls of a group instead of the engine: blocks, verification, dry runs, estimates."""
