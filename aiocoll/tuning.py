"""The tuning file, with the measurements of `aiocoll bench --tune`. Rank 0 reads it for all ranks.

    {"format": "aiocoll tuning", "version": 1, "machine": "its host name", "date": "when it was measured",
     "media": {"tcp": {"alpha": 3.1e-05, "overhead": 9e-06, "beta": 4.2e-10, "gamma": 5e-11}, "unix": ...},
     "single_copy": {"moved": 2097152, "spread": 524288, "reduced": null}}

Missing numbers have defaults, which also suit programs without a file. The defaults of single copy depend on the
processor. A size of null is never reached.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from typing import Any

from aiocoll.algorithms.machine import MEDIA, Machine, Medium, SingleCopy, Tuning
from aiocoll.errors import RendezvousError
from aiocoll.log import logger

__all__ = ["default_path", "dumps", "from_wire", "load", "to_wire"]

FORMAT, VERSION = "aiocoll tuning", 1
#: Maximum size of a tuning file in bytes, so that reading a wrong file does no harm.
_MAX_BYTES = 65536
#: Limits of each measured time in seconds, so that ratios of two times stay far from 0 and infinity.
_LEAST, _MOST = 1e-15, 1e3
_HINT = "write a new file with `aiocoll bench --tune`"
#: File with the processor's description on Linux.
_PROCESSORS = "/proc/cpuinfo"
#: Message sizes from which a receiver reads the sender's memory in place (`SingleCopy`), by processor vendor. On these
#: processors, copies in user space are slow compared to the kernel's, so the sizes are smaller than the default.
_SINGLE_COPY = {b"GenuineIntel": SingleCopy(reduced=2.0 * 1024 * 1024)}


class _OtherVersionError(Exception):
    """Raised for a tuning file of an unsupported version."""


def default_path(environ: Mapping[str, str]) -> str:
    """Return the path of this host's tuning file. It contains the host name: hosts may share a home directory."""
    cache = environ.get("XDG_CACHE_HOME", "")
    folder = cache if os.path.isabs(cache) else os.path.expanduser("~/.cache")
    return os.path.join(folder, "aiocoll", f"tuning-{socket.gethostname()}.json")


def load(path: str | None, environ: Mapping[str, str]) -> Tuning | None:
    """Return the tuning in the file `path`, by default the one that `aiocoll bench --tune` wrote for this host.

    Return None if there is no such file. For a file of another version, and a default file that cannot be used, log a
    warning and return None.

    Raises:
        ValueError: `path` cannot be read or is not a tuning file.
    """
    where = default_path(environ) if path is None else path
    try:
        return _parse(_read(where))
    except _OtherVersionError as error:
        logger.warning("%s is not used: %s; %s", where, error, _HINT)
    except (FileNotFoundError, NotADirectoryError) as error:
        if path is not None:
            raise ValueError(f"tuning={path!r}: {error.strerror}; {_HINT}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        if path is not None:
            raise ValueError(f"tuning={path!r}: {reason}; {_HINT}") from None
        logger.warning("%s is not used: %s; %s", where, reason, _HINT)
    return None


def dumps(machines: Mapping[Medium, Machine], date: str, single_copy: SingleCopy | None = None) -> str:
    """Return the content of a tuning file with measurements made on this host at `date`."""
    media = {medium: machine._asdict() for medium, machine in machines.items()}
    import json  # takes two milliseconds, and few programs have a tuning

    content: dict[str, Any] = {"format": FORMAT, "version": VERSION, "machine": socket.gethostname(), "date": date}
    content["media"] = media
    if single_copy is not None:
        found = single_copy._asdict().items()
        content["single_copy"] = {name: size if math.isfinite(size) else None for name, size in found}
    return json.dumps(content, indent=1) + "\n"


def _single_copy_here() -> SingleCopy:
    """Return the default size limits of single copy for the processor of this host."""
    try:
        with open(_PROCESSORS, "rb", buffering=0) as file:
            vendor = file.read(64).partition(b"vendor_id\t: ")[2].partition(b"\n")[0]
    except OSError:
        vendor = b""
    return _SINGLE_COPY.get(vendor, SingleCopy())


def to_wire(tuning: Tuning, cores: int) -> list[Any]:
    """Return the measurements of a host with `cores` cores, in the form that rank 0 publishes."""
    return [cores, *(list(getattr(tuning, medium)) for medium in MEDIA), list(tuning.single_copy)]


def from_wire(numbers: Any, medium: Any, ranks: int) -> Tuning:
    """Return the tuning that rank 0 has published, or the defaults if it has published no numbers.

    Measurements use two ranks with one core each. The defaults are for ranks that may share cores.

    Args:
        numbers: the published numbers, or None.
        medium: the published medium.
        ranks: number of ranks on the host of rank 0.

    Raises:
        RendezvousError: the numbers are not a tuning. Any client of the store could have written them.
    """
    if medium not in MEDIA:
        raise RendezvousError(f"rank 0 published an invalid medium in the store: {medium!r:.64}")
    if numbers is None:
        return Tuning(medium=medium, single_copy=_single_copy_here())
    try:
        if isinstance(numbers, list) and len(numbers) == 2 + len(MEDIA) and type(numbers[0]) is int and numbers[0] > 0:
            found = {name: _machine(name, each) for name, each in zip(MEDIA, numbers[1:-1], strict=True)}
            tuning = _tuning(found, _single_copy(numbers[-1]))
            return tuning._replace(medium=medium, crowd=max(ranks / numbers[0], 1.0))
        reason = f"{numbers!r:.64}"
    except ValueError as error:
        reason = str(error)
    raise RendezvousError(f"rank 0 published an invalid tuning in the store: {reason}")


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    return data


def _parse(data: bytes) -> Tuning:
    import json

    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'it has no "format": "{FORMAT}"')
    if content.get("version") != VERSION:
        raise _OtherVersionError(f"version {content.get('version')!r:.64} is not supported; supported: {VERSION}")
    media = content.get("media")
    if not isinstance(media, dict) or not media.keys() <= set(MEDIA):
        raise ValueError(f'"media" must be an object with some of {", ".join(MEDIA)}')
    found = {}
    for medium, numbers in media.items():
        if not isinstance(numbers, dict) or numbers.keys() != set(Machine._fields):
            raise ValueError(f'"{medium}" must be an object with {", ".join(Machine._fields)}')
        found[medium] = _machine(medium, [numbers[name] for name in Machine._fields])
    sizes = content.get("single_copy", {})
    if not isinstance(sizes, dict) or not sizes.keys() <= set(SingleCopy._fields):
        raise ValueError(f'"single_copy" must be an object with some of {", ".join(SingleCopy._fields)}')
    default = _single_copy_here()._asdict()
    given = {name: math.inf if size is None else size for name, size in sizes.items()}
    return _tuning(found, _single_copy(list((default | given).values())))


def _tuning(found: Mapping[Medium, Machine], single_copy: SingleCopy) -> Tuning:
    default = Tuning()
    tcp, unix, shm = (found.get(medium, getattr(default, medium)) for medium in MEDIA)
    return Tuning(tcp, unix, shm, single_copy=single_copy)


def _single_copy(sizes: Any) -> SingleCopy:
    if not isinstance(sizes, list) or len(sizes) != len(SingleCopy._fields):
        raise ValueError(f"single_copy: {sizes!r:.64} must be {len(SingleCopy._fields)} sizes")
    for name, size in zip(SingleCopy._fields, sizes, strict=True):
        if isinstance(size, bool) or not isinstance(size, int | float) or not size >= 0:
            raise ValueError(f"single_copy: {name}={size!r:.64} must be a number of bytes, or null")
    return SingleCopy(*map(float, sizes))


def _machine(medium: str, numbers: Any) -> Machine:
    if not isinstance(numbers, list) or len(numbers) != len(Machine._fields):
        raise ValueError(f"{medium}: {numbers!r:.64} must be {len(Machine._fields)} numbers")
    for name, number in zip(Machine._fields, numbers, strict=True):
        if isinstance(number, bool) or not isinstance(number, int | float) or not _LEAST <= number <= _MOST:
            raise ValueError(f"{medium}: {name}={number!r:.64} must be a number of seconds, {_LEAST} to {_MOST}")
    return Machine(*map(float, numbers))
