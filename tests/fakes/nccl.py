"""A simulated NCCL for tests: ranks are threads of one process, and NumPy computes the results on a fake CUDA.

As in real NCCL, a call enqueues a kernel on a stream and returns. The kernel occupies the stream and the device until
the kernels of all ranks run. Kernels of other communicators wait meanwhile. The n-th collective of a rank belongs to
the n-th collective of every other rank. If the calls differ or a rank makes none, all kernels wait until they are
aborted. `send` and `recv` wait for each other, except inside one group. Aborted calls count as done, with undefined
output.
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
    """The state that all ranks of a fake communicator share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.members: dict[int, FakeCommunicator] = {}
        # By NCCL call name: the ranks that have made this call, and an event that is set when all ranks have made it.
        self.connecting: defaultdict[str, set[int]] = defaultdict(set)
        self.connected: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        # An event that is set when all ranks have called `init`.
        self.complete = threading.Event()
        self.refused: str | None = None
        # True after a rank has aborted or failed. From then on, no kernel ends.
        self.stuck = False
        self.collectives: dict[int, list[FakeCall]] = {}
        self.messages: defaultdict[tuple[int, int], dict[str, list[FakeCall]]] = defaultdict(
            lambda: {"send": [], "recv": []}
        )


class FakeNccl:
    """A simulated NCCL library with the interface `aiocoll.gpu.api.Nccl`.

    Several libraries in one process, each with the fake CUDA of its own rank, can form communicators.

    Args:
        cuda: the fake CUDA on which its ranks run.
        version: NCCL's version number, such as 22809.

    Attributes:
        complaints: calls that do not match, so that their kernels never end. Real NCCL reports nothing.
        init_hangs: whether `init` never returns.
        abort_hangs: whether `abort` never returns and ends no kernel.
        hooks: called with the name of each function at its start; a hook may wait or raise.
        crashes: uses of ended communicators, and ends during a call of another thread. Real NCCL then uses freed
            memory, which may crash the process.
        connecting: the threads that were blocked in a first call.
        connects: whether ranks connect in their first calls, unless `NCCL_RUNTIME_CONNECT` is "0" in `init`.
    """

    #: Communicators for which some ranks have not called `init`, by unique id.
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
        """Make the next NCCL call of the named function raise a `DeviceError`, on any communicator."""
        self._next.setdefault(call, []).append(DeviceError(call, message, fatal=fatal))

    def version(self) -> int:
        """Return the NCCL version number, such as 22809."""
        return self._version

    def unique_id(self) -> bytes:
        """Return a new communicator id of 128 bytes, which one rank creates and sends to the other ranks."""
        self.begin("unique_id")
        return next(_ids).to_bytes(UNIQUE_ID_BYTES, "little")

    def init(self, world_size: int, unique_id: bytes, rank: int) -> FakeCommunicator:
        """Create this rank's communicator on the thread's device; block until all ranks have called `init`."""
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
        """Begin an NCCL call group: collect this thread's calls until `group_end`, and start them together."""
        self.begin("group_start")
        self._calls.append([])

    def group_end(self) -> None:
        """End an NCCL call group: start the calls since `group_start`, and raise the first error."""
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
        """The collected calls of this thread's open NCCL call groups, innermost group last."""
        if not hasattr(self._thread, "calls"):
            self._thread.calls = []
        found: list[list[tuple[FakeCommunicator, FakeCall]]] = self._thread.calls
        return found

    def begin(self, call: str) -> None:
        """Begin an NCCL call: create a CUDA context, and raise the error that `fail_next` has prepared."""
        for hook in self.hooks:
            hook(call)
        self.cuda.enter(call, self.cuda.current())
        if waiting := self._next.get(call):
            raise waiting.pop(0)

    def call(self, communicator: FakeCommunicator, call: FakeCall) -> None:
        """Start an NCCL call at once, or at the end of the open call group."""
        if self._calls:
            self._calls[-1].append((communicator, call))
        else:
            self._start([(communicator, call)])

    def _start(self, calls: list[tuple[FakeCommunicator, FakeCall]]) -> None:
        """Enqueue NCCL calls; all messages of one communicator on one stream form one kernel."""
        messages: defaultdict[tuple[FakeCommunicator, int], list[FakeCall]] = defaultdict(list)
        for communicator, call in calls:
            if call.peer is None:
                communicator.start([call], call.stream)
            else:
                messages[communicator, call.stream].append(call)
        for (communicator, stream), batch in messages.items():
            communicator.start(batch, stream)


class FakeCommunicator:
    """A communicator of one rank, with the interface `aiocoll.gpu.api.NcclCommunicator`.

    Only one thread at a time may call it, as in real NCCL.
    """

    def __init__(self, nccl: FakeNccl, world: _World, rank: int) -> None:
        self.nccl = nccl
        self.rank = rank
        self.device = nccl.cuda.current()
        self.bus_id = nccl.cuda.bus_id(self.device)
        #: Whether the first call of each kind blocks until the communicator is connected to all other ranks.
        self.connects = nccl.connects and os.environ.get("NCCL_RUNTIME_CONNECT") != "0"
        self.aborted = False
        self.destroyed = False
        self._world = world
        self._inside = threading.Lock()
        self._called = 0
        self._in_flight: set[FakeCall] = set()
        self._error: str | None = None
        self._ended = threading.Event()

    def fail(self, message: str = "unhandled system error") -> None:
        """Make the communicator fail: its kernels never end, and `async_error` returns the message."""
        with self._world.lock:
            self._error = message
            self._world.stuck = True

    @property
    def in_flight(self) -> int:
        """The number of NCCL calls that have started but not ended."""
        return len(self._in_flight)

    def all_reduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Reduce the `source` of all ranks into every rank's `target`, which may equal `source`."""
        self._call("all_reduce", source, count, target, count, dtype, stream, op=op)

    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        """Reduce the `source` of all ranks into the root's `target`."""
        written = count if self.rank == root else 0
        self._call("reduce", source, count, target, written, dtype, stream, op=op, root=root)

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        """Copy the root's `source` to every rank's `target`."""
        self._call("broadcast", source, count if self.rank == root else 0, target, count, dtype, stream, root=root)

    def all_gather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None:
        """Concatenate all ranks' `source`, of `count` elements each, in every rank's `target`."""
        self._call("all_gather", source, count, target, count * self._world.size, dtype, stream)

    def reduce_scatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Reduce the `source` of all ranks, and write the r-th `count` elements to rank r's `target`."""
        self._call("reduce_scatter", source, count * self._world.size, target, count, dtype, stream, op=op)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Send `count` elements to `peer`; the kernel ends when the peer receives them."""
        self._call("send", source, count, 0, 0, dtype, stream, peer=peer)

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Receive `count` elements from `peer`."""
        self._call("recv", 0, 0, target, count, dtype, stream, peer=peer)

    def async_error(self) -> str | None:
        """Return the message of an asynchronous NCCL error, or None."""
        with self._exclusive_call("async_error"):
            self._check_alive("async_error")
            self.nccl.begin("async_error")
            return self._error

    def abort(self) -> None:
        """Abort the communicator from any thread: all its calls in flight end with undefined results."""
        self.nccl.begin("abort")
        self._note_crash("abort")
        if self.nccl.abort_hangs:
            self.nccl.cuda.blocked.wait(threading.Event())
            return
        with self._world.lock:
            self.aborted = True
            self._world.stuck = True
            for call in self._in_flight:
                call.spoil()
                call.ended.set()
            self._ended.set()
            self._leave()
        self.nccl.cuda.rooms[self.device].wake_all()

    def destroy(self) -> None:
        """Destroy the communicator; block until all ranks have destroyed or aborted it."""
        self.nccl.begin("destroy")
        self._note_crash("destroy")
        self._check_alive("destroy")
        with self._world.lock:
            if self._in_flight:
                raise DeviceError("destroy", f"{len(self._in_flight)} calls are in flight")
            self.destroyed = True
            self._leave()
        self.nccl.cuda.blocked.wait(self._ended)

    # -- implementation

    def _leave(self) -> None:
        members = self._world.members.values()
        if all(member.destroyed or member.aborted for member in members):
            for member in members:
                member._ended.set()

    @contextmanager
    def _exclusive_call(self, call: str) -> Iterator[None]:
        if not self._inside.acquire(blocking=False):
            raise DeviceError(call, "called while another thread is in a call of this communicator")
        try:
            yield
        finally:
            self._inside.release()

    def _connect(self, name: str) -> None:
        """Block in the first call of each kind until all ranks have made it, unless `init` has connected the ranks."""
        if not self.connects or name in ("send", "recv"):
            return
        with self._world.lock:
            arrived, connected = self._world.connecting[name], self._world.connected[name]
            arrived.add(self.rank)
            if len(arrived) == self._world.size:
                connected.set()
        if not connected.is_set():
            self.nccl.connecting.append(threading.current_thread().name)
            self.nccl.cuda.blocked.wait(connected)

    def _note_crash(self, call: str) -> None:
        if self._inside.locked():
            self.nccl.crashes.append(f"{call} of rank {self.rank} while a thread is in another call")

    def _check_alive(self, call: str) -> None:
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
        """Check and start a call that reads `read` elements and writes `written` elements."""
        with self._exclusive_call(name):
            self.nccl.begin(name)
            self._check_alive(name)
            self._connect(name)
            self._start_checked(name, source, read, target, written, dtype, stream, op, root, peer)

    def _start_checked(
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
        """Enqueue NCCL calls on a stream as one kernel."""
        number = self._called
        self._called += calls[0].peer is None
        with self._world.lock:
            self._check_alive(calls[0].name)  # in a call group, an abort may come between the call and its start
            self._in_flight.update(calls)
        cuda = self.nccl.cuda
        on = cuda.stream_of(stream, calls[0].name, self.device)
        on.kernel(lambda: self._run(calls, number), cuda.latency)

    def _run(self, calls: list[FakeCall], number: int) -> None:
        """Execute the kernel of NCCL calls in the stream's thread."""
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
                    self._add_collective(call, number)
                else:
                    self._add_message(call, call.peer)
        for call in calls:
            if not call.ended.is_set():
                self.nccl.cuda.blocked.wait(call.ended)
        with self._world.lock:
            self._in_flight.difference_update(calls)

    def _add_collective(self, call: FakeCall, number: int) -> None:
        arrived = self._world.collectives.setdefault(number, [])
        arrived.append(call)
        if len(arrived) < self._world.size or self._world.stuck:
            return
        arrived.sort(key=lambda call: call.rank)
        if len({call.terms for call in arrived}) > 1:
            self.nccl.complaints.append(f"collective {number}: {', '.join(map(str, arrived))}")
            return
        del self._world.collectives[number]
        try:
            compute(arrived)
        finally:
            for each in arrived:
                each.ended.set()

    def _add_message(self, call: FakeCall, peer: int) -> None:
        ends = (self.rank, peer) if call.name == "send" else (peer, self.rank)
        arrived = self._world.messages[ends]
        arrived[call.name].append(call)
        while arrived["send"] and arrived["recv"] and not self._world.stuck:
            send, recv = arrived["send"][0], arrived["recv"][0]
            if send.read_bytes != recv.written_bytes:
                self.nccl.complaints.append(f"message: {send}, {recv}")
                return
            recv.target_bytes()[:] = send.source_bytes()
            for each in (arrived["send"].pop(0), arrived["recv"].pop(0)):
                each.ended.set()
