"""A rank that reduces every kind of NaN, and prints a digest of each result."""

from __future__ import annotations

import asyncio
import json
import sys
import zlib

import aiocoll
from aiocoll.elements.nan_fingerprint import nan_fingerprint
from tests.nans import COUNTS, cases, inputs, is_right, reduce_op

METHOD, RANK, SIZE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


async def main() -> None:
    digests = []
    async with aiocoll.new_group(init_method=METHOD, rank=RANK, world_size=SIZE, timeout=50) as pg:
        for op, dtype in cases():
            given = [inputs(dtype, count, SIZE) for count in COUNTS]
            works = [pg.allreduce(arrays[RANK].copy(), reduce_op(op)) for arrays in given]
            for arrays, work in zip(given, works, strict=True):
                result = await work
                assert is_right(op, arrays, result), (op, dtype, len(result))
                digests.append(zlib.crc32(result.tobytes()))
        algorithms = {row.algorithm for row in pg.stats().operations if row.op == "ALLREDUCE"}
    print(json.dumps([nan_fingerprint(), digests, sorted(map(str, algorithms))]))


asyncio.run(main())
