"""Interceptors, which take the calls of a group in place of the engine: blocks, verification, dry runs, estimates."""
