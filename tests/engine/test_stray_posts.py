"""Checks for posts that are never read, with a clock and an outbox that the test controls."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from aiocoll.engine.stray_posts import StrayPosts

GROUP, OP = 7, 3


class Job:
    """A stand-in for one rank: its group, its clock, and the outbox of one peer.

    Attributes:
        timers: pending callbacks.
        posts: operation, group and fingerprint of each unread post.
        mismatches: peer, operation and local call of each reported mismatch.
    """

    def __init__(self) -> None:
        self.timers: list[Callable[[], None]] = []
        self.posts: list[tuple[int, int, int]] = []
        self.mismatches: list[tuple[int, int, str]] = []
        self.operations: dict[int, Any] = {}
        self.group: Any = SimpleNamespace(
            rank=0,
            position={4: 1},
            in_flight=SimpleNamespace(find=self.operations.get),
            record=lambda op: None,
            mismatches=SimpleNamespace(disagree=lambda *mismatch: self.mismatches.append(mismatch)),
        )
        clock: Any = SimpleNamespace(call_later=lambda seconds, call: self.timers.append(call))
        self.strays = StrayPosts(clock, {GROUP: self.group})
        outbox: Any = SimpleNamespace(unread=lambda: self.posts)
        self.strays.outboxes = ((4, outbox),)

    def run_check(self) -> None:
        (timer,) = self.timers
        self.timers.clear()
        timer()


def test_stray_post_check_runs_once_for_many_posts_and_again_for_later_posts() -> None:
    job = Job()
    for _ in range(2):
        job.strays.watch()
        job.strays.watch()
        job.run_check()
        assert job.timers == [], "a check is scheduled although no posts are unread"


def test_early_post_is_checked_until_this_rank_makes_the_call() -> None:
    job = Job()
    job.posts = [(OP, GROUP, 1)]
    job.strays.watch()
    job.run_check()
    job.run_check()
    assert job.mismatches == []
    job.operations[OP] = SimpleNamespace(fingerprint=1, describe=lambda: "the same")
    job.run_check()
    assert job.mismatches == []
    job.operations[OP] = SimpleNamespace(fingerprint=2, describe=lambda: "another")
    job.run_check()
    assert job.mismatches == [(1, OP, "another")]


def test_post_for_an_unknown_group_is_not_reported() -> None:
    job = Job()
    job.posts = [(OP, GROUP + 1, 1)]
    job.strays.watch()
    job.run_check()
    assert job.mismatches == []


def test_unread_chunk_is_compared_with_the_local_call_after_two_checks() -> None:
    job = Job()
    heads: list[tuple[int, tuple[int, int, int]] | None] = [(1, (OP, GROUP, 1)), (5, (OP, GROUP, 1)), None]
    link: Any = SimpleNamespace(chunks=SimpleNamespace(head=lambda: heads[0]))
    job.strays.links = ((4, link),)
    job.operations[OP] = SimpleNamespace(fingerprint=2, describe=lambda: "mine")
    job.strays.watch()
    job.run_check()
    heads.pop(0)
    job.run_check()
    assert job.mismatches == [], "a chunk was reported while an operation may still read it"
    job.run_check()
    assert job.mismatches == [(1, OP, "mine")]
    heads.pop(0)
    job.run_check()
    assert job.timers == [], "a check is scheduled although no posts are unread"
