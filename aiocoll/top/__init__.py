"""Telling `aiocoll top` what this process does: a socket in a folder, and the two ends of what is said there."""
