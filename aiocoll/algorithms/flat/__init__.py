"""Schedules that take all ranks to be equally far from each other."""
