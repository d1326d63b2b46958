"""Dumps of flight recorders: the files, the signal that requests them, and their form as a timeline."""
