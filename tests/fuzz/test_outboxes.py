"""Fuzz tests of shared memory: if one rank corrupts its outbox, the calls of all ranks end in time."""

from __future__ import annotations

from hypothesis import strategies as st

from .budget import fuzz
from .outboxes import Attack, attacks, run_jobs


@fuzz(st.lists(attacks, min_size=8, max_size=8), examples=6)
def test_calls_end_for_any_contents_of_a_peers_outbox(attacked: list[Attack]) -> None:
    run_jobs(attacked)
