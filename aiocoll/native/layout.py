"""Constants of the shared-memory layout for Python and C. The build generates `layout.h` from this module.

This module imports nothing from the package, since the build runs it alone.
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

#: Number of bytes in a cache line.
LINE: Final = 64

#: Number of chunks in a queue if both of its ends run the accelerator. The queue is as large as a second-level cache,
#: because overwriting data that another core has just read is slow. With queues of 256 KiB, an allreduce of 1 MiB takes
#: twice as long.
CHUNKS: Final = 8
#: Number of chunks in a queue if one of its ends runs pure Python. The chunks are larger, because Python needs 3 µs per
#: chunk.
LARGE_CHUNKS: Final = 4

#: Number of small slots at the start of a lane: twice the maximum number of operations in flight without frames. A rank
#: may finish all these operations, and start as many new ones, before a peer has read the first post.
SMALL_SLOTS: Final = 128
MIDDLE_SLOTS: Final = 4
#: Number of slots in a lane.
SLOTS: Final = SMALL_SLOTS + MIDDLE_SLOTS

# Indices of the 8-byte words at the start of an outbox. The lanes follow.
STATUS: Final = 0
"""The status of the rank: even while it will check all links before it sleeps, odd while it must be woken."""
CORE: Final = 8
"""The CPU core on which the rank ran when it last waited for long."""

# Indices of the 8-byte words in a lane. A table with one word per slot takes `_ROW` words.
_ROW: Final = SLOTS + -SLOTS % 8
POSTS: Final = 0
"""Number of posts so far for the reader of this lane."""
CHUNKED: Final = 1
"""Number of operations that have written their last chunk to the chunk queue to the reader."""
COMMON_NAMED: Final = 8
"""Per slot of the common lane: the number of the last post for this reader; 0 if the post was withdrawn."""
LANE_NAMED: Final = COMMON_NAMED + _ROW
"""Per slot of this lane: the number of the last post for its reader; 0 if the post was withdrawn."""
COMMON_CONSUMED: Final = LANE_NAMED + _ROW
"""Per slot of the reader's common lane: the number of the last post that this rank has consumed."""
LANE_CONSUMED: Final = COMMON_CONSUMED + _ROW
"""Per slot of the reader's lane for this rank: the number of the last post that this rank has consumed."""
LANE_WORDS: Final = LANE_CONSUMED + _ROW
"""Number of words in a lane."""

# Indices in the state array of each end of a chunk queue, which Python and C share.
CHUNK_NUMBER: Final = 0
"""At the writer: number of chunks written. At the reader: number of the next chunk."""
CHUNK_HOLDER: Final = 1
"""At the writer: id of the operation that holds the queue; 0 while the queue is free."""
CHUNK_HOLDER_GROUP: Final = 2
"""At the writer: the group of the operation that holds the queue, or that held it last."""
CHUNK_LAST: Final = 3
"""At the writer: id of the last operation that wrote all its chunks; the largest number if the last one failed."""
CHUNK_READY: Final = 4
"""At the writer: 1 if the memory of the queue is allocated."""
CHUNK_GROUPS_OVER: Final = 5
"""At the reader: number of ended groups that may have left chunks in the queue."""
CHUNK_FIRST: Final = 6
"""At the writer: number of chunks written before the current operation, or up to the last failure."""
CHUNK_STATE: Final = 7
"""Number of words in the private state of an end."""
