"""A store plugin that keeps entries as files: URL ``shelf:///path``, command ``aiocoll shelf PATH``."""

from __future__ import annotations

import argparse
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiocoll.errors import StoreUnavailableError
from aiocoll.plugins import COMMAND_VERSION, STORE_VERSION, Command, Registry, StoreOpener, StoreRequest
from aiocoll.store import KeyValueStore, Store

_SCHEME = "shelf://"


class ShelfStore(KeyValueStore):
    """A store with one file per entry. A lock on the folder makes each change atomic."""

    def __init__(self, folder: str | os.PathLike[str], timeout: float = 300.0) -> None:
        super().__init__(timeout)
        self._folder = Path(folder)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._closed = False

    async def read(self, name: str) -> bytes | None:
        with self._locked():
            return self._value(name)

    async def compare_and_swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        with self._locked():
            if self._value(name) != old:
                return False
            if new is None:
                self._file(name).unlink(missing_ok=True)
            else:
                self._file(name).write_bytes(name.encode() + b"\0" + new)
            return True

    async def names(self) -> list[str]:
        with self._locked():
            return [file.read_bytes().partition(b"\0")[0].decode() for file in self._folder.glob("*.entry")]

    async def aclose(self) -> None:
        self._closed = True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._closed:
            raise StoreUnavailableError(f"the ShelfStore in {self._folder} is closed: make a new one")
        with open(self._folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _file(self, name: str) -> Path:
        from hashlib import sha256  # a key may be longer than the name of a file

        return self._folder / f"{sha256(name.encode()).hexdigest()}.entry"

    def _value(self, name: str) -> bytes | None:
        try:
            return self._file(name).read_bytes().partition(b"\0")[2]
        except FileNotFoundError:
            return None


class _Opener:
    served_by_rank_0 = False
    has_secrets = False

    def check(self, url: str, world_size: int) -> None:
        if not url.removeprefix(_SCHEME).startswith("/"):
            raise ValueError("the path must be absolute, like shelf:///shared/job")

    def open(self, request: StoreRequest) -> Store:
        return ShelfStore(Path(request.url.removeprefix(_SCHEME), request.job), request.timeout)


OPENER = _Opener()


def register(stores: Registry[StoreOpener]) -> None:
    stores.register("shelf", OPENER, version=STORE_VERSION)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="the folder of a store")
    parser.set_defaults(command=_list)


def _list(args: argparse.Namespace) -> int:
    for file in sorted(Path(args.path).rglob("*.entry")):
        print(file.read_bytes().partition(b"\0")[0].decode())
    return 0


def register_command(commands: Registry[Command]) -> None:
    commands.register("shelf", Command("list the keys of a shelf", "aiocoll_shelf:configure"), version=COMMAND_VERSION)
