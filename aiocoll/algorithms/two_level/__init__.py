"""Schedules for ranks on several hosts."""
