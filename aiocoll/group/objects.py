"""Collectives on Python objects, by msgpack; see `aiocoll.codec` for what travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiocoll.codec import dumps, reading
from aiocoll.engine.operations.base import Signature
from aiocoll.engine.operations.incremental import Steps
from aiocoll.engine.operations.object_exchange import ObjectExchange, Parcels
from aiocoll.group.launch import Launcher, Timeout
from aiocoll.options import seconds
from aiocoll.work import Work

__all__ = ["Objects"]

Parcel = Mapping[int, memoryview]


class Objects(Launcher):
    """Object collectives: called by all ranks in the same order (or with the same `key`), results are new objects.

    An object that cannot travel raises `SerializationError` at the call, which names its type and path. Sizes are
    capped at 16 MiB per object. Cost: one step; each object is sent straight to its receivers.
    """

    def broadcast_object(
        self, obj: Any = None, root: int = 0, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[Any]:
        """Return `root`'s object on every rank; `obj` is ignored on the others."""
        root = self._check_rank(root, "root")
        if root != self._rank:
            return self._parcels("BROADCAST_OBJECT", root, {}, {root}, lambda got: self._load(got[root]), timeout, key)
        data = self._dump(obj)
        outgoing = {rank: data for rank in range(self._size) if rank != root}
        return self._parcels("BROADCAST_OBJECT", root, outgoing, set(), lambda _: _known(obj), timeout, key)

    def allgather_object(self, obj: Any, *, timeout: Timeout = None, key: str | None = None) -> Work[list[Any]]:
        """Return every rank's object, in rank order, on every rank."""
        data = self._dump(obj)
        others = set(range(self._size)) - {self._rank}
        outgoing = dict.fromkeys(sorted(others), data)
        return self._parcels("ALLGATHER_OBJECT", None, outgoing, others, lambda got: self._list(got, obj), timeout, key)

    def gather_object(
        self, obj: Any, root: int = 0, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any] | None]:
        """Return every rank's object, in rank order, at `root`; None elsewhere."""
        root = self._check_rank(root, "root")
        if root != self._rank:
            data = {root: self._dump(obj)}
            return self._parcels("GATHER_OBJECT", root, data, set(), lambda _: _known(None), timeout, key)
        others = set(range(self._size)) - {root}
        return self._parcels("GATHER_OBJECT", root, {}, others, lambda got: self._list(got, obj), timeout, key)

    def scatter_object(
        self, objs: Sequence[Any] | None, root: int = 0, *, timeout: Timeout = None, key: str | None = None
    ) -> Work[Any]:
        """Return the r-th of `root`'s objects on rank r; `objs` is ignored on the others."""
        root = self._check_rank(root, "root")
        if root != self._rank:
            return self._parcels("SCATTER_OBJECT", root, {}, {root}, lambda got: self._load(got[root]), timeout, key)
        self._check_one_per_rank(objs, "objs", "object")
        assert objs is not None
        outgoing = {rank: self._dump(each) for rank, each in enumerate(objs) if rank != root}
        return self._parcels("SCATTER_OBJECT", root, outgoing, set(), lambda _: _known(objs[root]), timeout, key)

    def alltoall_object(
        self, objs: Sequence[Any], *, timeout: Timeout = None, key: str | None = None
    ) -> Work[list[Any]]:
        """Send the r-th object to rank r; return what every rank sent here, in rank order."""
        self._check_one_per_rank(objs, "objs", "object")
        outgoing = {rank: self._dump(each) for rank, each in enumerate(objs) if rank != self._rank}
        mine = objs[self._rank]
        others = set(outgoing)
        return self._parcels("ALLTOALL_OBJECT", None, outgoing, others, lambda got: self._list(got, mine), timeout, key)

    def _parcels(
        self,
        op: str,
        root: int | None,
        outgoing: Mapping[int, bytes],
        sources: set[int],
        unpack: Callable[[Parcel], Steps],
        timeout: Timeout,
        key: str | None,
    ) -> Work[Any]:
        limit = self._member.timeout if timeout is None else seconds(timeout, "timeout")
        terms = Signature(op, "object", (), root, None)

        def make(identity: int, work: Work[Any]) -> ObjectExchange:
            return ObjectExchange(self._member, identity, terms, Parcels(outgoing, sources, unpack), work)

        return self._begin(op, make, limit, terms, key, nbytes=sum(map(len, outgoing.values())))

    def _dump(self, obj: Any) -> bytes:
        return dumps(obj, allow_pickle=self._options.allow_pickle)

    def _load(self, data: memoryview) -> Steps:
        return reading(data, allow_pickle=self._options.allow_pickle)

    def _list(self, got: Parcel, mine: Any) -> Steps:
        found: list[Any] = []
        for rank in range(self._size):
            found.append(mine if rank == self._rank else (yield from self._load(got[rank])))
            yield
        return found


def _known(obj: Any) -> Steps:
    """Return what needs no reading."""
    yield
    return obj
