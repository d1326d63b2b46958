"""Interceptors, which take a group's calls instead of the engine: blocks, verification, dry runs, estimates."""
