"""Collectives on Python objects, encoded with msgpack; `aiocoll.codec` lists the supported types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiocoll.codec import dumps, reading
from aiocoll.completion import Completion
from aiocoll.engine.operations.incremental import Steps, run_to_end
from aiocoll.engine.operations.object_exchange import ObjectExchange, Parcels
from aiocoll.engine.operations.signature import Signature
from aiocoll.group.dispatch.dispatcher import Dispatcher, Timeout
from aiocoll.group.prepared_call import FactoryCall
from aiocoll.work import Work

__all__ = ["Objects"]

Parcel = Mapping[int, memoryview]


class Objects:
    """The object collectives of one group. `ProcessGroup` documents the calls.

    Args:
        dispatcher: dispatcher of the group.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._rank = dispatcher.rank
        self._size = dispatcher.size
        self._others = frozenset(dispatcher.comm.others)
        self._allow_pickle = dispatcher.options.allow_pickle

    def broadcast(self, obj: Any, root: int, timeout: Timeout, key: str | None) -> Work[Any]:
        """Start a broadcast of an object."""
        root = self._dispatcher.check_rank(root, "root")
        if root != self._rank:
            return self._start_receiving("BROADCAST_OBJECT", root, timeout, key)
        data = self.dump(obj)
        outgoing = dict.fromkeys(sorted(self._others), data)
        return self._start(
            "BROADCAST_OBJECT", root, Parcels(outgoing, (), lambda _: _return_object(obj)), obj, timeout, key
        )

    def allgather(
        self, obj: Any, timeout: Timeout, key: str | None, conclude: Callable[[list[Any]], Any] | None = None
    ) -> Work[Any]:
        """Start an allgather of objects. `conclude` converts the list of objects to the result of the call."""
        outgoing = dict.fromkeys(sorted(self._others), self.dump(obj))
        parcels = Parcels(outgoing, self._others, lambda got: self._decode_all(got, obj, conclude))
        return self._start("ALLGATHER_OBJECT", None, parcels, obj, timeout, key)

    def gather(self, obj: Any, root: int, timeout: Timeout, key: str | None) -> Work[list[Any] | None]:
        """Start a gather of objects."""
        root = self._dispatcher.check_rank(root, "root")
        if root != self._rank:
            parcels = Parcels({root: self.dump(obj)}, (), lambda _: _return_object(None))
        else:
            parcels = Parcels({}, self._others, lambda got: self._decode_all(got, obj))
        return self._start("GATHER_OBJECT", root, parcels, obj, timeout, key)

    def scatter(self, objs: Sequence[Any] | None, root: int, timeout: Timeout, key: str | None) -> Work[Any]:
        """Start a scatter of objects."""
        root = self._dispatcher.check_rank(root, "root")
        if root != self._rank:
            return self._start_receiving("SCATTER_OBJECT", root, timeout, key)
        if (wrong := self._dispatcher.count_error(objs, "objs", "object")) is not None:
            return self._report_wrong(wrong, "SCATTER_OBJECT", root, timeout, key)
        assert objs is not None
        outgoing = {rank: self.dump(each) for rank, each in enumerate(objs) if rank != root}
        parcels = Parcels(outgoing, (), lambda _: _return_object(objs[root]))
        return self._start("SCATTER_OBJECT", root, parcels, None, timeout, key)

    def alltoall(self, objs: Sequence[Any], timeout: Timeout, key: str | None) -> Work[list[Any]]:
        """Start an alltoall of objects."""
        if (wrong := self._dispatcher.count_error(objs, "objs", "object")) is not None:
            return self._report_wrong(wrong, "ALLTOALL_OBJECT", None, timeout, key)
        outgoing = {rank: self.dump(each) for rank, each in enumerate(objs) if rank != self._rank}
        mine = objs[self._rank]
        parcels = Parcels(outgoing, self._others, lambda got: self._decode_all(got, mine))
        return self._start("ALLTOALL_OBJECT", None, parcels, mine, timeout, key)

    def dump(self, obj: Any) -> bytes:
        """Encode an object. The group's options determine whether pickle is allowed."""
        return dumps(obj, allow_pickle=self._allow_pickle)

    def load(self, data: memoryview) -> Steps:
        """Decode an object step by step. The group's options determine whether pickle is allowed."""
        return reading(data, allow_pickle=self._allow_pickle)

    def _start_receiving(self, op: str, root: int, timeout: Timeout, key: str | None) -> Work[Any]:
        return self._start(op, root, Parcels({}, (root,), lambda got: self.load(got[root])), None, timeout, key)

    def _start(
        self, op: str, root: int | None, parcels: Parcels, mine: Any, timeout: Timeout, key: str | None
    ) -> Work[Any]:
        """Start a call. A dry run receives from each other rank the object sent to it, or `mine` if there is none."""
        comm = self._dispatcher.comm
        signature = Signature(op, "object", (), root, None)

        def make(identity: int, completion: Completion) -> ObjectExchange:
            return ObjectExchange(comm, identity, signature, parcels, completion)

        nbytes = sum(map(len, parcels.outgoing.values()))
        limit, result = self._dispatcher.limit(timeout), None
        if self._dispatcher.dry:
            own, sent = self.dump(mine), parcels.outgoing
            result = run_to_end(parcels.unpack({rank: memoryview(sent.get(rank, own)) for rank in range(self._size)}))
        return self._dispatcher.start(FactoryCall(signature, make, limit, key, result=result, nbytes=nbytes))

    def _report_wrong(
        self, wrong: ValueError, op: str, root: int | None, timeout: Timeout, key: str | None
    ) -> Work[Any]:
        return self._dispatcher.refuse(wrong, Signature(op, "object", (), root, None), (), timeout, key)

    def _decode_all(self, got: Parcel, mine: Any, conclude: Callable[[list[Any]], Any] | None = None) -> Steps:
        found: list[Any] = []
        for rank in range(self._size):
            found.append(mine if rank == self._rank else (yield from self.load(got[rank])))
            yield
        return found if conclude is None else conclude(found)


def _return_object(obj: Any) -> Steps:
    """Return an object that needs no decoding, by a generator like those that decode in steps."""
    yield
    return obj
