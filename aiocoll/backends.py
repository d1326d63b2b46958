"""Backend registry: the device kinds of each backend, and the parser of the argument `backend`.

    name     devices         description
    aio      cpu, cuda       aiocoll; CUDA arrays by NCCL, or through the host if the ranks cannot use NCCL
    nccl     cuda            aiocoll; requires NCCL for CUDA arrays
    fake     cpu, cuda       transfers no data; for dry runs, see `aiocoll.rendezvous.dry_run`

CUDA arrays need the extra `cuda12` or `cuda13`. Without it, the first call on a CUDA array raises an error.
`register_backend` adds other backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from aiocoll.registry import load_shipped

__all__ = [
    "Backend",
    "BackendConfig",
    "factory_of",
    "kind_of",
    "refuse_device",
    "register_backend",
    "serve_device",
    "sole_backend",
]

#: Group factories of third-party backends, by name of the backend.
_factories: dict[str, Callable[..., Any]] = {}


#: Maps each backend named after a device library to the built-in backend that implements it: "nccl" to "aio".
_libraries: dict[str, str] = {}
#: Names of torch.distributed backends that aiocoll lacks. A program ported from torch.distributed can omit `backend`.
_OTHERS = {"gloo", "mpi", "threaded", "ucc", "xccl"}


class Backend(str):
    """The name of an existing backend, in lower case: ``Backend("AIO") == "aio" == Backend.AIO``.

    Each registered backend is also an attribute. `GLOO`, `MPI`, `UCC` and `XCCL` exist because programs for
    torch.distributed compare with them. These backends do not exist unless they are registered.

    Attributes:
        backend_list: all names.
        default_device_backend_map: the default backend of each device.
        backend_capability: the devices that each backend serves.

    Raises:
        TypeError: `name` is not a str.
        ValueError: there is no such backend. The message lists the existing ones.
    """

    __slots__ = ()

    UNDEFINED: ClassVar[str] = "undefined"
    AIO: ClassVar[str] = "aio"
    NCCL: ClassVar[str] = "nccl"
    FAKE: ClassVar[str] = "fake"
    GLOO: ClassVar[str] = "gloo"
    MPI: ClassVar[str] = "mpi"
    UCC: ClassVar[str] = "ucc"
    XCCL: ClassVar[str] = "xccl"

    backend_list: ClassVar[list[str]] = [AIO, FAKE]
    default_device_backend_map: ClassVar[dict[str, str]] = {"cpu": AIO}
    backend_capability: ClassVar[dict[str, tuple[str, ...]]] = {AIO: ("cpu",), FAKE: ("cpu",)}

    def __new__(cls, name: str) -> Backend:
        """Check that the backend exists, and return its name in lower case."""
        if not isinstance(name, str):
            raise TypeError(f"backend must be a str, not {type(name).__name__}")
        lower = name.lower()
        if lower != cls.UNDEFINED and lower not in cls.backend_list:
            hint = ", or leave out backend=: only torch has this backend" if lower in _OTHERS else ", or register it"
            raise ValueError(f"backend={name!r} is not known; use {', '.join(cls.backend_list)}{hint}")
        return super().__new__(cls, lower)

    @classmethod
    def register_backend(cls, name: str, factory: Callable[..., Any], devices: str | Iterable[str] = ("cpu",)) -> None:
        """Register the function that makes the groups of `new_group(backend=name)`.

        `new_group` then calls `factory(store, rank, world_size, timeout, device, options=...)` and returns its result
        unchecked. The result need not be a `ProcessGroup`. A later factory replaces an earlier one of the same name.

        Args:
            name: any name except those of built-in backends.
            factory: returns the group, or an awaitable of it. `timeout` is in seconds, `device` is the caller's
                argument, `options` is a `GroupOptions` with every field set.
            devices: the kinds of device that the backend serves. It becomes the default of those that have none.

        Raises:
            TypeError: `name` is not a str, or `factory` is not callable.
            ValueError: `name` is reserved or not a valid name, or `devices` is empty.
        """
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, not {type(name).__name__}")
        lower = name.lower()
        own = lower in cls.backend_list and lower not in _factories
        if own or lower == cls.UNDEFINED or not lower.replace("-", "_").isidentifier():
            raise ValueError(f"name={name!r} cannot be registered; choose another name, of letters, digits, _ and -")
        if not callable(factory):
            raise TypeError(f"factory must be callable, not {type(factory).__name__}")
        served = (devices,) if isinstance(devices, str) else tuple(devices)
        if not served or not all(isinstance(device, str) and device.isidentifier() for device in served):
            raise ValueError(
                f"devices={devices!r}: must be kinds of device, such as 'cpu' or {[*cls.default_device_backend_map]}"
            )
        _factories[lower] = factory
        if lower not in cls.backend_list:
            cls.backend_list.append(lower)
        if not hasattr(cls, lower.upper()):
            setattr(cls, lower.upper(), lower)
        cls.backend_capability[lower] = served
        for device in served:
            cls.default_device_backend_map.setdefault(device, lower)


register_backend = Backend.register_backend


def serve_device(kind: str, library: str) -> None:
    """Make the built-in backends support a kind of device, and add a backend named `library` for that kind.

    Args:
        kind: the kind of device. Its device backend is registered in `aiocoll.group.dispatch.devices`.
        library: name of the library that transfers arrays between such devices, in lower case.

    Raises:
        ValueError: `library` is the name of another backend.
    """
    if library in _factories or Backend.backend_capability.get(library, (kind,)) != (kind,):
        raise ValueError(f"library={library!r} is another backend; use the name of the library for {kind!r} devices")
    if library not in Backend.backend_list:
        Backend.backend_list.insert(Backend.backend_list.index(Backend.FAKE), library)
    for own in (Backend.AIO, Backend.FAKE):
        if kind not in Backend.backend_capability[own]:
            Backend.backend_capability[own] += (kind,)
    Backend.backend_capability[library] = (kind,)
    Backend.default_device_backend_map[kind] = library
    _libraries[library] = Backend.AIO
    if not hasattr(Backend, library.upper()):
        setattr(Backend, library.upper(), library)


def _format() -> str:
    """Return the remedy text for error messages about a malformed argument `backend`."""
    own = {kind: name for kind, name in Backend.default_device_backend_map.items() if name not in _factories}
    return f"write pairs of device and backend, such as '{','.join(map(':'.join, own.items()))}'"


class BackendConfig:
    """The backend of each kind of device, parsed from the argument `backend`.

    Args:
        backend: a name, for all devices that the backend serves; or pairs of device and name, separated by commas.
            None or "undefined" means "aio".

    Attributes:
        device_backend_map: backend by device, in the given order.

    Raises:
        TypeError: `backend` is neither a str nor None.
        ValueError: a backend is unknown or does not serve its device, a device is named twice, or a pair is malformed.
    """

    def __init__(self, backend: str | None = None) -> None:
        if backend is not None and not isinstance(backend, str):
            raise TypeError(f"backend must be a str or None, not {type(backend).__name__}")
        if backend is None or backend.lower() == Backend.UNDEFINED:
            backend = Backend.AIO
        self.device_backend_map: dict[str, Backend] = {}
        if ":" not in backend:
            name = Backend(backend)
            self.device_backend_map = dict.fromkeys(Backend.backend_capability[name], name)
            return
        for pair in backend.lower().split(","):
            device, _, text = (part.strip() for part in pair.partition(":"))
            if not device or not text or ":" in text:
                raise ValueError(f"backend={backend!r}: {pair!r} is not a pair of device and backend; {_format()}")
            if device in self.device_backend_map:
                raise ValueError(f"backend={backend!r} names device {device!r} twice; {_format()}")
            name = Backend(text)
            if device not in Backend.backend_capability.get(name, ()):
                served = ", ".join(Backend.backend_capability.get(name, ()))
                raise ValueError(f"backend={backend!r}: {name!r} does not serve device {device!r}; it serves {served}")
            self.device_backend_map[device] = name

    def __repr__(self) -> str:
        return ",".join(f"{device}:{backend}" for device, backend in self.device_backend_map.items())

    def get_device_backend_map(self) -> dict[str, Backend]:
        """Return the attribute `device_backend_map`, as in torch.distributed."""
        return self.device_backend_map


def factory_of(backend: str) -> Callable[..., Any] | None:
    """Return the group factory of a third-party backend; None for built-in backends."""
    return _factories.get(backend)


def kind_of(device: str, name: str) -> str:
    """Return the kind of `device`, such as "cuda" for "cuda:0"; `name` is the argument's name in error messages.

    Raises:
        ValueError: its index is not a number from 0.
    """
    kind, colon, index = device.partition(":")
    if colon and not (index.isascii() and index.isdecimal()):
        raise ValueError(f"{name}={device!r}: the index {index!r} must be a number from 0, as in '{kind}:0'")
    return kind


def refuse_device(device: str, devices: Mapping[str, str]) -> None:
    """Raise an error unless `devices`, a map of device kinds to backends, contains the kind of `device`.

    Raises:
        ValueError: the device has no backend, or its index is not a number.
    """
    if kind_of(device, "device") not in devices:
        served = ", ".join(f"{name!r} ({serves})" for name, serves in devices.items())
        raise ValueError(f"device={device!r} has no backend; this group has backends for {served}")


def sole_backend(devices: Mapping[str, str]) -> str:
    """Return the one backend that serves all of `devices`, a map of device kinds to backends.

    The backend of a device library, such as "nccl", is the built-in backend "aio", which then requires that library.

    Raises:
        ValueError: the devices need more than one backend.
    """
    names = list(dict.fromkeys(_libraries.get(name, name) for name in devices.values()))
    if len(names) > 1:
        together = " and ".join(map(repr, [Backend.AIO, *map(str, _libraries)]))
        raise ValueError(
            f"backend={','.join(map(':'.join, devices.items()))!r}: a group has one backend for all its devices (only "
            f"{together} can be combined); make one group for each backend"
        )
    return str(names[0])


load_shipped()  # `Backend.backend_list` then has the backends of this package, too
