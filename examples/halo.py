"""Heat in a plate, on a grid of ranks: aiocoll run -n 4 examples/halo.py

Each rank has a block of the plate, with a border of ghost cells for the cells of its neighbours. A rank receives the
ghost cells while it computes the inner cells. The plate is hot at its upper edge, and its left and right edges are
joined. At the end, rank 0 computes the whole plate alone, and compares the results.
"""

import asyncio
import math

import numpy as np

import aiocoll

ROWS, COLUMNS = 48, 60
STEPS = 200
RATE = 0.2


async def main() -> None:
    async with aiocoll.new_group() as pg:
        cart = pg.cart([0, 0], periods=[False, True])
        assert cart is not None, "the grid has a place for every rank"
        rows, columns = (share(*each) for each in zip((ROWS, COLUMNS), cart.dims, cart.coords(), strict=True))
        u = np.zeros((rows.stop - rows.start + 2, columns.stop - columns.start + 2))
        if rows.start == 0:
            u[0] = 1.0  # the hot edge; the opposite edge stays cold

        plan = pg.plan(pg.allreduce, largest := np.zeros(1), aiocoll.ReduceOp.MAX)
        for _ in range(STEPS):
            work = cart.halo(u)
            change = np.zeros_like(u)
            change[2:-2, 2:-2] = flow(u[1:-1, 1:-1])
            await work
            for edge in (np.s_[0:3, :], np.s_[-3:, :], np.s_[:, 0:3], np.s_[:, -3:]):
                change[edge][1:-1, 1:-1] = flow(u[edge])
            u += change
            largest[0] = abs(change).max()
            await plan.start()

        blocks = await pg.gather_object((rows.start, columns.start, u[1:-1, 1:-1]), root=0)
        if blocks is not None:
            plate = np.zeros((ROWS, COLUMNS))
            for row, column, block in blocks:
                plate[row : row + block.shape[0], column : column + block.shape[1]] = block
            alone, change = one_rank()
            assert np.array_equal(plate, alone), "the plates of many ranks and of one differ"
            assert math.isclose(largest[0], change)
            print(f"{cart.dims[0]} x {cart.dims[1]} ranks: heat {plate.sum():.6f}, last change {largest[0]:.6f}")


def share(length: int, ranks: int, rank: int) -> slice:
    """Return the slice of an axis of `length` cells that belongs to `rank`."""
    return slice(length * rank // ranks, length * (rank + 1) // ranks)


def flow(u: np.ndarray) -> np.ndarray:
    """Return how the inner cells of `u` change in one time step."""
    return RATE * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1])


def one_rank() -> tuple[np.ndarray, float]:
    """Compute on one rank, for comparison; return the whole plate, and the largest change of the last step."""
    u = np.zeros((ROWS + 2, COLUMNS + 2))
    u[0] = 1.0
    change = np.zeros(1)
    for _ in range(STEPS):
        u[:, 0], u[:, -1] = u[:, -2].copy(), u[:, 1].copy()
        change = flow(u)
        u[1:-1, 1:-1] += change
    return u[1:-1, 1:-1], float(abs(change).max())


asyncio.run(main())
