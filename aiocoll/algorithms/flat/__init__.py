"""Flat schedules, which treat all pairs of ranks as equally distant."""
