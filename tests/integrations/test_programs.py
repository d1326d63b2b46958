"""The choice of the error that `Ranks.results` raises if several ranks fail."""

import asyncio

from aiocoll import GroupRevokedError, Meeting, PeerLostError, Ticket
from aiocoll.integrations.programs import Ranks


def peer_lost() -> PeerLostError:
    return PeerLostError("rank 1 of group 'world:0' is gone", group="world:0", ranks=(1,))


def group_revoked() -> GroupRevokedError:
    error = GroupRevokedError("group 'world:0' on rank 0 was revoked", group="world:0")
    error.__cause__ = peer_lost()
    return error


async def outcome_of(*errors: BaseException) -> BaseException:
    """Return the error that `Ranks.results` raises if the ranks raise `errors`, one after the other."""
    turns = [asyncio.Event() for _ in errors]

    async def fail(number: int, ticket: Ticket) -> None:
        if number > 0:
            await turns[number - 1].wait()
        turns[number].set()
        raise errors[number]

    with Meeting(len(errors)) as meeting:
        try:
            await Ranks(meeting, fail).results()
        except Exception as error:
            return error
    raise AssertionError("the program did not fail")


async def test_error_of_the_program_takes_precedence_over_group_errors() -> None:
    blamed = ValueError("negative")
    for errors in ([blamed, peer_lost()], [peer_lost(), blamed], [group_revoked(), peer_lost(), blamed]):
        assert await outcome_of(*errors) is blamed


async def test_program_raises_the_cause_of_a_revoked_group() -> None:
    """Expect `PeerLostError` whether a rank raises it, or raises `GroupRevokedError` with it as cause."""
    for errors in ([peer_lost(), group_revoked()], [group_revoked(), peer_lost()], [group_revoked(), group_revoked()]):
        assert isinstance(await outcome_of(*errors), PeerLostError)
