"""What a program of an engine raises when its ranks fail."""

import asyncio

from aiocoll import GroupRevokedError, Meeting, PeerLostError, Ticket
from aiocoll.integrations.programs import Ranks


def lost() -> PeerLostError:
    return PeerLostError("rank 1 of group 'world:0' is gone", group="world:0", ranks=(1,))


def revoked() -> GroupRevokedError:
    error = GroupRevokedError("group 'world:0' on rank 0 was revoked", group="world:0")
    error.__cause__ = lost()
    return error


async def outcome_of(*errors: BaseException) -> BaseException:
    """Return what `Ranks.results` raises if each rank raises one of these, in this order."""
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


async def test_programs_own_error_is_raised_first() -> None:
    blamed = ValueError("negative")
    for errors in ([blamed, lost()], [lost(), blamed], [revoked(), lost(), blamed]):
        assert await outcome_of(*errors) is blamed


async def test_group_that_failed_before_a_call_raises_its_cause() -> None:
    """As it does during a call: which of the two a rank meets is chance."""
    for errors in ([lost(), revoked()], [revoked(), lost()], [revoked(), revoked()]):
        assert isinstance(await outcome_of(*errors), PeerLostError)
