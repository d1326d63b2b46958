"""Dumps of flight recorders: the files, the signal that requests dumps, and their conversion to a timeline."""
