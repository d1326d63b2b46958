"""An NCCL without devices, for tests: ranks are threads of one process, and collectives are NumPy on a fake CUDA.

As in the real one, a call is put on a stream and ends at once; there it occupies the stream, and the device, until the
kernels of all ranks are there: kernels of other communicators wait for it. The n-th collective of one rank belongs to
the n-th of every other rank: if they are not the same, or somebody does not come, all wait until they abort. `send`
and `recv` wait for each other, unless they are called in one group. Aborted calls count as done, and have spoiled what
they were to write.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiocoll.gpu.api import DeviceError

from .calls import DTYPES, FLOAT8_CAPABILITY, FLOAT8_SINCE, OPS, FakeCall, compute
from .cuda import FakeCuda

UNIQUE_ID_BYTES = 128

_ids = itertools.count(1)


class _World:
    """All ranks of a communicator."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.members: dict[int, FakeCommunicator] = {}
        # By the name of a call: the ranks that have made it, and what is set when all have.
        self.connecting: defaultdict[str, set[int]] = defaultdict(set)
        self.connected: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        # Set when all are there.
        self.complete = threading.Event()
        self.refused: str | None = None
        # Nothing ends any more once a rank is gone or broken.
        self.stuck = False
        self.collectives: dict[int, list[FakeCall]] = {}
        self.messages: defaultdict[tuple[int, int], dict[str, list[FakeCall]]] = defaultdict(
            lambda: {"send": [], "recv": []}
        )


class FakeNccl:
    """An NCCL library, as `aiocoll.gpu.api.Nccl` wants it.

    Several of one process, each with the fake CUDA of its own rank, see each other.

    Args:
        cuda: where its ranks run.
        version: as NCCL numbers them.

    Attributes:
        complaints: what was called that does not belong together, which is why nothing ends: the real one is silent.
        init_hangs: `init` does not come back.
        abort_hangs: `abort` does not come back, and ends nothing.
        hooks: what is told each call by its name as it begins; it may wait or raise.
        crashes: ends of communicators that a thread was in a call of, or that had ended: the real one then goes on with
            freed memory, which may end the process.
        connecting: the threads that were held up in a first call.
        connects: ranks are connected in first calls, unless a setting says otherwise as the communicator is made.
    """

    #: Worlds that form, by unique id.
    _worlds: dict[bytes, _World] = {}  # noqa: RUF012
    _lock = threading.Lock()

    def __init__(self, cuda: FakeCuda, version: int = 22809) -> None:
        self.cuda = cuda
        self.complaints: list[str] = []
        self.crashes: list[str] = []
        self.connecting: list[str] = []
        self.connects = False
        self.init_hangs = False
        self.abort_hangs = False
        self.hooks: list[Callable[[str], object]] = []
        self._version = version
        self._thread = threading.local()
        self._next: dict[str, list[DeviceError]] = {}

    def fail_next(self, call: str, message: str = "internal error", *, fatal: bool = True) -> None:
        """Let the next call of one function fail, of any communicator."""
        self._next.setdefault(call, []).append(DeviceError(call, message, fatal=fatal))

    def version(self) -> int:
        """Return its version, such as 22809."""
        return self._version

    def unique_id(self) -> bytes:
        """Return the name of a new communicator, 128 bytes; one rank calls it and tells the others."""
        self.begin("unique_id")
        return next(_ids).to_bytes(UNIQUE_ID_BYTES, "little")

    def init(self, world_size: int, unique_id: bytes, rank: int) -> FakeCommunicator:
        """Return this rank's end, on the thread's device; blocks until all ranks have called it."""
        self.begin("init")
        if len(unique_id) != UNIQUE_ID_BYTES or not 0 <= rank < world_size:
            raise DeviceError("init", f"invalid argument: rank {rank} of {world_size}", fatal=False)
        with self._lock:
            world = self._worlds.setdefault(unique_id, _World(world_size))
        made = FakeCommunicator(self, world, rank)
        with world.lock:
            self._join(world, made, world_size)
            if len(world.members) == world.size:
                with self._lock:
                    self._worlds.pop(unique_id, None)
                world.complete.set()
        if self.init_hangs:
            self.cuda.blocked.wait(threading.Event())
        self.cuda.blocked.wait(world.complete)
        if world.refused is not None:
            raise DeviceError("init", world.refused)
        return made

    def _join(self, world: _World, made: FakeCommunicator, world_size: int) -> None:
        if world_size != world.size or made.rank in world.members:
            raise DeviceError("init", f"invalid usage: rank {made.rank} of {world_size}, of {world.size}", fatal=False)
        for other in world.members.values():
            if other.bus_id == made.bus_id:
                world.refused = f"invalid usage: Duplicate GPU detected: rank {made.rank} and rank {other.rank}"
            if other.nccl.version() != self._version:
                world.refused = f"invalid usage: Mismatched NCCL version: rank {made.rank} and rank {other.rank}"
        world.members[made.rank] = made

    def group_start(self) -> None:
        """Collect the calls of this thread until `group_end`: none waits for another."""
        self.begin("group_start")
        self._calls.append([])

    def group_end(self) -> None:
        """Start what was called since `group_start`; raises what any of it raised."""
        if not self._calls:
            raise DeviceError("group_end", "invalid usage: there was no group_start", fatal=False)
        called = self._calls.pop()
        self.begin("group_end")
        if self._calls:
            self._calls[-1] += called
        else:
            self._start(called)

    @property
    def _calls(self) -> list[list[tuple[FakeCommunicator, FakeCall]]]:
        """What was called in the open groups of this thread, the innermost last."""
        if not hasattr(self._thread, "calls"):
            self._thread.calls = []
        found: list[list[tuple[FakeCommunicator, FakeCall]]] = self._thread.calls
        return found

    def begin(self, call: str) -> None:
        """Make a context on the thread's device, to which NCCL goes back in the end; let the call fail if it has to."""
        for hook in self.hooks:
            hook(call)
        self.cuda.enter(call, self.cuda.current())
        if waiting := self._next.get(call):
            raise waiting.pop(0)

    def call(self, communicator: FakeCommunicator, call: FakeCall) -> None:
        """Start a call, now or at the end of the group."""
        if self._calls:
            self._calls[-1].append((communicator, call))
        else:
            self._start([(communicator, call)])

    def _start(self, calls: list[tuple[FakeCommunicator, FakeCall]]) -> None:
        """Put calls on their streams: messages between the same ends are one kernel."""
        messages: defaultdict[tuple[FakeCommunicator, int], list[FakeCall]] = defaultdict(list)
        for communicator, call in calls:
            if call.peer is None:
                communicator.start([call], call.stream)
            else:
                messages[communicator, call.stream].append(call)
        for (communicator, stream), batch in messages.items():
            communicator.start(batch, stream)


class FakeCommunicator:
    """One rank's end, as `aiocoll.gpu.api.NcclCommunicator` wants it.

    All calls must come one after the other: the real one is not for several threads at a time.
    """

    def __init__(self, nccl: FakeNccl, world: _World, rank: int) -> None:
        self.nccl = nccl
        self.rank = rank
        self.device = nccl.cuda.current()
        self.bus_id = nccl.cuda.bus_id(self.device)
        #: It connects with other ranks in the first call of each kind.
        self.connects = nccl.connects and os.environ.get("NCCL_RUNTIME_CONNECT") != "0"
        self.aborted = False
        self.destroyed = False
        self._world = world
        self._inside = threading.Lock()
        self._called = 0
        self._in_flight: set[FakeCall] = set()
        self._error: str | None = None
        self._over = threading.Event()

    def fail(self, message: str = "unhandled system error") -> None:
        """Break it on the way: nothing ends, and `async_error` tells."""
        with self._world.lock:
            self._error = message
            self._world.stuck = True

    @property
    def in_flight(self) -> int:
        """How many calls have been started and have not ended."""
        return len(self._in_flight)

    def all_reduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Reduce over all ranks into every rank's `target`; in place if both are one."""
        self._call("all_reduce", source, count, target, count, dtype, stream, op=op)

    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        """Reduce over all ranks into the root's `target`."""
        written = count if self.rank == root else 0
        self._call("reduce", source, count, target, written, dtype, stream, op=op, root=root)

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        """Copy the root's `source` to every rank's `target`."""
        self._call("broadcast", source, count if self.rank == root else 0, target, count, dtype, stream, root=root)

    def all_gather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None:
        """Write every rank's `count` elements behind each other into every rank's `target`."""
        self._call("all_gather", source, count, target, count * self._world.size, dtype, stream)

    def reduce_scatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Reduce, and leave part r, of `count` elements, in rank r's `target`."""
        self._call("reduce_scatter", source, count * self._world.size, target, count, dtype, stream, op=op)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Send to `peer`, whose `recv` it waits for."""
        self._call("send", source, count, 0, 0, dtype, stream, peer=peer)

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Receive from `peer`."""
        self._call("recv", 0, 0, target, count, dtype, stream, peer=peer)

    def async_error(self) -> str | None:
        """Return what has failed on the way, and None if all is well."""
        with self._alone("async_error"):
            self._check("async_error")
            self.nccl.begin("async_error")
            return self._error

    def abort(self) -> None:
        """Give up all that is in flight: it counts as done, with undefined results; may be called from any thread."""
        self.nccl.begin("abort")
        self._check_end("abort")
        if self.nccl.abort_hangs:
            self.nccl.cuda.blocked.wait(threading.Event())
            return
        with self._world.lock:
            self.aborted = True
            self._world.stuck = True
            for call in self._in_flight:
                call.spoil()
                call.ended.set()
            self._over.set()
            self._leave()
        self.nccl.cuda.rooms[self.device].changed()

    def destroy(self) -> None:
        """End the communicator; all ranks of a host have to, and nothing may be in flight."""
        self.nccl.begin("destroy")
        self._check_end("destroy")
        self._check("destroy")
        with self._world.lock:
            if self._in_flight:
                raise DeviceError("destroy", f"{len(self._in_flight)} calls are in flight")
            self.destroyed = True
            self._leave()
        self.nccl.cuda.blocked.wait(self._over)

    # -- how it works

    def _leave(self) -> None:
        members = self._world.members.values()
        if all(member.destroyed or member.aborted for member in members):
            for member in members:
                member._over.set()

    @contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        if not self._inside.acquire(blocking=False):
            raise DeviceError(call, "called while another thread calls it: it is not for several at a time")
        try:
            yield
        finally:
            self._inside.release()

    def _connect(self, name: str) -> None:
        """Wait in the first call of a kind until all ranks have made one, unless the communicator was made so."""
        if not self.connects or name in ("send", "recv"):
            return
        with self._world.lock:
            there, connected = self._world.connecting[name], self._world.connected[name]
            there.add(self.rank)
            if len(there) == self._world.size:
                connected.set()
        if not connected.is_set():
            self.nccl.connecting.append(threading.current_thread().name)
            self.nccl.cuda.blocked.wait(connected)

    def _check_end(self, call: str) -> None:
        if self._inside.locked():
            self.nccl.crashes.append(f"{call} of rank {self.rank} while a thread is in another call")

    def _check(self, call: str) -> None:
        if self.aborted or self.destroyed:
            self.nccl.crashes.append(f"{call} of rank {self.rank} after its end")
            raise DeviceError(call, f"the communicator was {'aborted' if self.aborted else 'destroyed'}")

    def _call(
        self,
        name: str,
        source: int,
        read: int,
        target: int,
        written: int,
        dtype: int,
        stream: int,
        *,
        op: int | None = None,
        root: int | None = None,
        peer: int | None = None,
    ) -> None:
        """Check a call that reads and writes so many elements, and start it."""
        with self._alone(name):
            self.nccl.begin(name)
            self._check(name)
            self._connect(name)
            self._checked(name, source, read, target, written, dtype, stream, op, root, peer)

    def _checked(
        self,
        name: str,
        source: int,
        read: int,
        target: int,
        written: int,
        dtype: int,
        stream: int,
        op: int | None,
        root: int | None,
        peer: int | None,
    ) -> None:
        known = dtype in DTYPES and (self.nccl.version() >= FLOAT8_SINCE or DTYPES[dtype].itemsize > 1 or dtype < 2)
        if not known or op not in (*OPS, None):
            raise DeviceError(name, f"invalid argument: dtype {dtype}, op {op}", fatal=False)
        if op is not None and DTYPES[dtype].kind == "half" and DTYPES[dtype].itemsize == 1:
            for member in self._world.members.values():
                if member.nccl.cuda.capability(member.device) < FLOAT8_CAPABILITY:
                    raise DeviceError(name, f"invalid argument: rank {member.rank} cannot reduce float8", fatal=False)
        for rank in (root, peer):
            if rank is not None and not 0 <= rank < self._world.size:
                raise DeviceError(name, f"invalid argument: rank {rank} of {self._world.size}", fatal=False)
        cuda = self.nccl.cuda
        cuda.stream_of(stream, name, self.device)
        ends = (source, read, target, written, DTYPES[dtype])
        call = FakeCall(cuda.memory, self.device, self.rank, name, *ends, stream, op, root, peer)
        cuda.check(name, source, call.read_bytes, self.device)
        cuda.check(name, target, call.written_bytes, self.device)
        if call.overlaps():
            raise DeviceError(name, "invalid argument: source and target overlap", fatal=False)
        if read or written:
            self.nccl.call(self, call)

    def start(self, calls: list[FakeCall], stream: int) -> None:
        """Put calls on the stream, as one kernel."""
        number = self._called
        self._called += calls[0].peer is None
        with self._world.lock:
            self._check(calls[0].name)  # it may have been aborted since it was called, in a group
            self._in_flight.update(calls)
        cuda = self.nccl.cuda
        on = cuda.stream_of(stream, calls[0].name, self.device)
        on.kernel(lambda: self._run(calls, number), cuda.latency)

    def _run(self, calls: list[FakeCall], number: int) -> None:
        """Be the kernel."""
        room = self.nccl.cuda.rooms[self.device]
        room.enter(self, lambda: self.aborted, self.nccl.cuda.blocked)
        try:
            self._take_part(calls, number)
        finally:
            room.leave()

    def _take_part(self, calls: list[FakeCall], number: int) -> None:
        with self._world.lock:
            for call in () if self.aborted else calls:
                if call.peer is None:
                    self._arrive(call, number)
                else:
                    self._post(call, call.peer)
        for call in calls:
            if not call.ended.is_set():
                self.nccl.cuda.blocked.wait(call.ended)
        with self._world.lock:
            self._in_flight.difference_update(calls)

    def _arrive(self, call: FakeCall, number: int) -> None:
        there = self._world.collectives.setdefault(number, [])
        there.append(call)
        if len(there) < self._world.size or self._world.stuck:
            return
        there.sort(key=lambda call: call.rank)
        if len({call.terms for call in there}) > 1:
            self.nccl.complaints.append(f"collective {number}: {', '.join(map(str, there))}")
            return
        del self._world.collectives[number]
        try:
            compute(there)
        finally:
            for each in there:
                each.ended.set()

    def _post(self, call: FakeCall, peer: int) -> None:
        ends = (self.rank, peer) if call.name == "send" else (peer, self.rank)
        there = self._world.messages[ends]
        there[call.name].append(call)
        while there["send"] and there["recv"] and not self._world.stuck:
            send, recv = there["send"][0], there["recv"][0]
            if send.read_bytes != recv.written_bytes:
                self.nccl.complaints.append(f"message: {send}, {recv}")
                return
            recv.written_to()[:] = send.read_from()
            for each in (there["send"].pop(0), there["recv"].pop(0)):
                each.ended.set()
