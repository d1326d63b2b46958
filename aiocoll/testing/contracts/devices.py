"""The contract of device backends: tests of calls on device arrays."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aiocoll.backends import Backend
from aiocoll.elements.buffers import view
from aiocoll.elements.device import DeviceArray
from aiocoll.elements.ops import ReduceOp
from aiocoll.errors import CollectiveMismatchError, CollectiveTimeoutError, GroupError
from aiocoll.group.dispatch.devices import devices
from aiocoll.group.messages import Recv, Send
from aiocoll.group.process_group import ProcessGroup
from aiocoll.options import GroupOptions
from aiocoll.rendezvous.new_group import new_group
from aiocoll.store import HashStore
from aiocoll.testing.ranks import run_ranks

__all__ = ["DeviceContract", "ToDevice", "ToHost"]

#: A function that copies a host array to the device of a rank. All ranks are in this process.
ToDevice = Callable[[NDArray[Any], int], Any]
#: A function that copies a device array to the host.
ToHost = Callable[[Any], NDArray[Any]]

_SIZES = pytest.mark.parametrize("size", [1, 2, 3])
_COUNTS = (0, 1, 7, 1000, 100_000)


class DeviceContract:
    """Tests that every device backend must pass, together with the adapter of its arrays.

    A subclass has three fixtures: `kind`, the kind of device, and the functions `to_device` and `to_host`, which copy
    arrays. `to_device` may place the arrays of all ranks on one device. The fixture `dtypes` may be overridden.
    """

    @pytest.fixture
    def dtypes(self) -> tuple[str, ...]:
        """Return dtypes whose sums the device can compute."""
        return ("float32", "float64", "int32", "int64")

    # -- the backend and the arrays

    def test_backend_describes_its_devices(self, kind: str) -> None:
        backend = devices.get(kind)
        assert backend.kind == kind
        assert backend.label
        assert backend.library in Backend.backend_list, "call `serve_device`"
        assert Backend.backend_capability[backend.library] == (kind,)
        assert backend.count() >= 1

    async def test_device_that_does_not_exist_is_refused(self, kind: str) -> None:
        count = devices.get(kind).count()
        with pytest.raises(ValueError, match=f"device='{kind}:{count}' not found"):
            new_group(device=f"{kind}:{count}", store=HashStore(), rank=0, world_size=1)

    def test_array_is_viewed_as_memory_of_the_device(self, kind: str, to_device: ToDevice, to_host: ToHost) -> None:
        values = np.arange(12.0).reshape(3, 4)
        array = to_device(values, 0)
        buffer = view(array)
        flat: Any = buffer.array
        assert isinstance(flat, DeviceArray)
        assert (flat.kind, flat.label) == (kind, devices.get(kind).label)
        assert (flat.size, flat.nbytes, buffer.shape) == (12, 96, (3, 4))
        assert buffer.result is array
        assert flat.ptr
        assert flat[3:5].ptr == flat.ptr + 24
        assert flat.overlaps(flat[3:5])
        assert not flat[:3].overlaps(flat[3:5])
        assert not flat.overlaps(view(to_device(values, 0)).array)
        empty: Any = view(to_device(np.zeros(0), 0)).array
        assert empty.ptr == 0
        assert (to_host(array) == values).all()

    async def test_dry_run_needs_no_device(self, to_device: ToDevice) -> None:
        async with new_group("fake", rank=0, world_size=3) as pg:
            array = to_device(np.ones(3), 0)
            assert await pg.allreduce(array) is array
            assert await pg.send(array, 1) is array
            assert await pg.recv(array, 1) is array

    # -- collectives

    @_SIZES
    async def test_allreduce_adds_in_place(
        self, size: int, to_device: ToDevice, to_host: ToHost, dtypes: tuple[str, ...]
    ) -> None:
        async def main(pg: ProcessGroup) -> None:
            for dtype in dtypes:
                for count in _COUNTS:
                    array = to_device(np.full(count, pg.rank() + 1, dtype), pg.rank())
                    assert await pg.allreduce(array) is array
                    assert to_host(array).dtype == dtype
                    assert (to_host(array) == size * (size + 1) // 2).all()
            for op, expected in ((ReduceOp.MAX, size), (ReduceOp.MIN, 1), (ReduceOp.AVG, (size + 1) / 2)):
                array = to_device(np.full((2, 3), pg.rank() + 1.0), pg.rank())
                await pg.allreduce(array, op)
                assert (to_host(array) == expected).all()

        await run_ranks(size, main)

    @_SIZES
    async def test_rooted_collectives(self, size: int, to_device: ToDevice, to_host: ToHost) -> None:
        async def main(pg: ProcessGroup) -> None:
            rank, root = pg.rank(), pg.size() - 1

            def new(value: float) -> Any:
                return to_device(np.full(5, value), rank)

            def holds(array: Any, value: float) -> bool:
                return bool(to_host(array).tolist() == [value] * 5)

            assert holds(await pg.broadcast(new(rank), root), root)
            reduced = await pg.reduce(new(rank + 1), root)
            assert holds(reduced, size * (size + 1) / 2 if rank == root else rank + 1)
            outputs = [new(-1) for _ in range(size)] if rank == root else None
            await pg.gather(outputs, new(rank), root)
            assert all(holds(array, peer) for peer, array in enumerate(outputs or ()))
            inputs = [new(10 * peer) for peer in range(size)] if rank == root else None
            assert holds(await pg.scatter(new(-1), inputs, root), 10 * rank)

        await run_ranks(size, main)

    @_SIZES
    async def test_collectives_with_an_array_per_rank(self, size: int, to_device: ToDevice, to_host: ToHost) -> None:
        async def main(pg: ProcessGroup) -> None:
            rank = pg.rank()

            def new(value: float, count: int) -> Any:
                return to_device(np.full(count, value), rank)

            outputs = [new(-1, 4) for _ in range(size)]
            assert await pg.allgather(outputs, new(rank, 4)) is outputs
            assert [to_host(each).tolist() for each in outputs] == [[peer] * 4 for peer in range(size)]
            outputs = [new(-1, peer + 1) for peer in range(size)]
            await pg.alltoall(outputs, [new(10 * rank + peer, rank + 1) for peer in range(size)])
            assert [to_host(each).tolist() for each in outputs] == [
                [10 * peer + rank] * (peer + 1) for peer in range(size)
            ]
            output = await pg.reduce_scatter(new(-1, 3), [new(rank + 10 * peer, 3) for peer in range(size)])
            assert to_host(output).tolist() == [size * (size - 1) / 2 + 10 * rank * size] * 3

        await run_ranks(size, main)

    @_SIZES
    async def test_prefixes(self, size: int, to_device: ToDevice, to_host: ToHost) -> None:
        async def main(pg: ProcessGroup) -> None:
            rank = pg.rank()
            array = to_device(np.full(3, rank + 1.0), rank)
            assert to_host(await pg.scan(array)).tolist() == [(rank + 1) * (rank + 2) / 2] * 3
            array = to_device(np.full(3, rank + 1.0), rank)
            assert to_host(await pg.exscan(array)).tolist() == [rank * (rank + 1) / 2 if rank else 1] * 3

        await run_ranks(size, main)

    async def test_calls_with_keys_match_in_any_order(self, to_device: ToDevice, to_host: ToHost) -> None:
        async def main(pg: ProcessGroup) -> None:
            keys = [str((each + pg.rank()) % 3) for each in range(3)]
            works = {key: pg.allreduce(to_device(np.full(4, int(key)), pg.rank()), key=key) for key in keys}
            for key, work in works.items():
                assert to_host(await work).tolist() == [3 * int(key)] * 4

        await run_ranks(3, main)

    async def test_many_calls_in_flight_end_with_their_own_results(self, to_device: ToDevice, to_host: ToHost) -> None:
        async def main(pg: ProcessGroup) -> None:
            works = [pg.allreduce(to_device(np.full(10, each), pg.rank())) for each in range(100)]
            gc.collect()  # now only the pending calls hold the arrays
            for each, work in enumerate(works):
                assert to_host(await work).tolist() == [2 * each] * 10

        await run_ranks(2, main)

    async def test_block_carries_out_its_calls(self, to_device: ToDevice, to_host: ToHost) -> None:
        async def main(pg: ProcessGroup) -> None:
            async with pg.coalescing():
                works = [pg.allreduce(to_device(np.full(10, each + 1.0), pg.rank())) for each in range(4)]
                maximum = pg.allreduce(to_device(np.full(3, pg.rank()), pg.rank()), ReduceOp.MAX)
                spread = pg.broadcast(to_device(np.full(3, pg.rank()), pg.rank()), 1)
            assert [to_host(await work)[0] for work in works] == [2, 4, 6, 8]
            assert to_host(await maximum).tolist() == to_host(await spread).tolist() == [1, 1, 1]

        await run_ranks(2, main)

    async def test_plan_is_started_often(self, to_device: ToDevice, to_host: ToHost) -> None:
        async def main(pg: ProcessGroup) -> None:
            array = to_device(np.ones(6), pg.rank())
            plan = pg.plan(pg.allreduce, array)
            for power in range(1, 6):
                await plan.start()
                assert to_host(array).tolist() == [2**power] * 6

        await run_ranks(2, main)

    # -- messages

    async def test_messages_arrive_in_order(self, to_device: ToDevice, to_host: ToHost) -> None:
        async def main(pg: ProcessGroup) -> None:
            other = 1 - pg.rank()
            sent = [pg.send(to_device(np.full(count, 1.0 + count), pg.rank()), other) for count in _COUNTS]
            for count in _COUNTS:
                array = to_device(np.zeros(count), pg.rank())
                assert await pg.recv(array, other) is array
                assert (to_host(array) == 1 + count).all()
            for work in sent:
                await work

        await run_ranks(2, main)

    async def test_batch_exchanges_messages(self, to_device: ToDevice, to_host: ToHost) -> None:
        async def main(pg: ProcessGroup) -> None:
            rank, size = pg.rank(), pg.size()
            below, above = (rank - 1) % size, (rank + 1) % size
            sent, received = to_device(np.full(50, rank), rank), to_device(np.zeros(50, np.int64), rank)
            assert await pg.batch([Send(sent, above), Recv(received, below)]) == [sent, received]
            assert to_host(received).tolist() == [below] * 50

        await run_ranks(3, main)

    # -- refusals and failures

    async def test_arrays_of_host_and_device_are_refused_in_one_call(self, to_device: ToDevice) -> None:
        async def main(pg: ProcessGroup) -> None:
            with pytest.raises(TypeError, match="all arrays of a call must be on one device"):
                pg.allgather([np.zeros(3)], to_device(np.ones(3), 0))
            with pytest.raises(TypeError, match="and dst=0 is this rank"):
                pg.send(to_device(np.ones(3), 0), 0)
            assert await pg.allreduce(1) == 1

        await run_ranks(1, main)

    async def test_calls_that_differ_fail_on_all_ranks(self, to_device: ToDevice) -> None:
        async def main(pg: ProcessGroup) -> None:
            with pytest.raises(CollectiveMismatchError, match="Collectives differ in the following: counts, shape"):
                await pg.allreduce(to_device(np.ones(3 + pg.rank()), pg.rank()))

        await run_ranks(2, main, options=GroupOptions(verify="before"))

    async def test_call_that_a_rank_does_not_make_expires(self, to_device: ToDevice) -> None:
        async def main(pg: ProcessGroup) -> None:
            await pg.allreduce(to_device(np.ones(3), pg.rank()))
            if pg.rank() == 0:
                with pytest.raises(CollectiveTimeoutError, match=r"did not complete within 0\.1 s on rank 0"):
                    await pg.allreduce(to_device(np.ones(3), 0), timeout=0.1)
            else:
                with pytest.raises(GroupError, match=r"did not complete within 0\.1 s on rank 0"):
                    await pg.recv_object(0)

        await run_ranks(2, main)

    async def test_abort_fails_the_calls_in_flight(self, to_device: ToDevice) -> None:
        async def main(pg: ProcessGroup) -> None:
            await pg.allreduce(to_device(np.ones(3), pg.rank()))
            if pg.rank() == 0:
                work = pg.allreduce(to_device(np.ones(3), 0))
                await pg.send_object("called", 1)
                with pytest.raises(GroupError, match="a test has ended the group"):
                    await work
            else:
                assert await pg.recv_object(0) == "called"
                pg.abort("a test has ended the group")

        await run_ranks(2, main)
