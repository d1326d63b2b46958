"""Numbers of the shared-memory layout that Python and C share; the build generates `layout.h` from them.

It imports nothing of the package, since the build runs it alone.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "CHUNKED",
    "CHUNKS",
    "CHUNK_FIRST",
    "CHUNK_GROUPS_OVER",
    "CHUNK_HOLDER",
    "CHUNK_HOLDER_GROUP",
    "CHUNK_LAST",
    "CHUNK_NUMBER",
    "CHUNK_READY",
    "CHUNK_STATE",
    "COMMON_CONSUMED",
    "COMMON_NAMED",
    "CORE",
    "LANE_CONSUMED",
    "LANE_NAMED",
    "LANE_WORDS",
    "LARGE_CHUNKS",
    "LINE",
    "MIDDLE_SLOTS",
    "POSTS",
    "SLOTS",
    "SMALL_SLOTS",
    "STATUS",
]

#: Bytes of a cache line.
LINE: Final = 64

#: Chunks that a queue holds if both of its ends run the accelerator. All are together as large as a second-level cache:
#: what one core has just read is dear to overwrite for another one. With queues of 256 KiB an allreduce of 1 MiB takes
#: twice as long.
CHUNKS: Final = 8
#: Chunks of any other queue, which are larger, since each takes Python 3 µs.
LARGE_CHUNKS: Final = 4

#: Slots of a lane, the small ones first: operations in flight at once that need no frames, twice over, since a
#: rank may be through with all of them before a peer has read the first.
SMALL_SLOTS: Final = 128
MIDDLE_SLOTS: Final = 4
#: Slots of a lane.
SLOTS: Final = SMALL_SLOTS + MIDDLE_SLOTS

# Words of an outbox.
STATUS: Final = 0
"""Even while the rank will look at all its links before it sleeps, and odd while it has to be woken."""
CORE: Final = 8
"""Which core the rank ran on when it last waited for long."""

# Words of a lane; the slots that they are about have these numbers.
_ROW: Final = SLOTS + -SLOTS % 8
POSTS: Final = 0
"""How often something was posted for its reader."""
CHUNKED: Final = 1
"""How often an operation has put its last chunk into the queue of a link to the reader."""
COMMON_NAMED: Final = 8
"""One word per slot of the common lane: number of the last post that its reader is to read; 0 if that was withdrawn."""
LANE_NAMED: Final = COMMON_NAMED + _ROW
"""The same of this lane's slots."""
COMMON_CONSUMED: Final = LANE_NAMED + _ROW
"""One word per slot of the reader's common lane: number of the last post that this rank has consumed."""
LANE_CONSUMED: Final = COMMON_CONSUMED + _ROW
"""The same of the slots of the reader's lane for this rank."""
LANE_WORDS: Final = LANE_CONSUMED + _ROW
"""How many words a lane has."""

# What the two ends of a chunk queue keep to themselves; Python and C share these numbers.
CHUNK_NUMBER: Final = 0
"""Of the writer: how many chunks have been put. Of the reader: the number of the next one."""
CHUNK_HOLDER: Final = 1
"""Of the writer: id of the operation that has the queue; 0 while it is free."""
CHUNK_HOLDER_GROUP: Final = 2
"""Of the writer: the group of that operation, or of the last one."""
CHUNK_LAST: Final = 3
"""Of the writer: id of the last operation that put all its chunks; the largest number if the last one failed."""
CHUNK_READY: Final = 4
"""Of the writer: the memory of the queue is there."""
CHUNK_GROUPS_OVER: Final = 5
"""Of the reader: how many groups are over of which there may still be chunks."""
CHUNK_FIRST: Final = 6
"""Of the writer: how many chunks had been put when that operation got the queue; if it failed, when it left."""
CHUNK_STATE: Final = 7
"""How many numbers these are."""
