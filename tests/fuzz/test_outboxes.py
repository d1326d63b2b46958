"""Outboxes in which a broken rank has changed memory words: every call ends in time, with a result or an error."""

from __future__ import annotations

from hypothesis import strategies as st

from .budget import fuzz
from .outboxes import Attack, attacks, run_jobs


@fuzz(st.lists(attacks, min_size=8, max_size=8), examples=6)
def test_calls_end_for_any_contents_of_a_peers_outbox(attacked: list[Attack]) -> None:
    run_jobs(attacked)
