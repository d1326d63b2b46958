"""Two-level schedules, for ranks on several hosts."""
