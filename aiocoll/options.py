"""The options of a group: given explicitly, else by `AIOCOLL_<NAME>` in the environment, else the default.

    option        environment             default
    transport     AIOCOLL_TRANSPORT       "auto"
    interface     AIOCOLL_INTERFACE       none: the interface with the route to the master
    bind          AIOCOLL_BIND            none: the address of that interface
    port_range    AIOCOLL_PORT_RANGE      none: any free port
    advertise     AIOCOLL_ADVERTISE       none: the address and the port on which this rank listens
    connections   AIOCOLL_CONNECTIONS     none: as many as fill the link, four at most
    encryption    AIOCOLL_ENCRYPTION      "auto"
    tls_ca, tls_certificate, tls_key      none: each process makes a certificate for itself
    job_id        AIOCOLL_JOB_ID          none
    job_key       see `job_key`           none
    spin_us       AIOCOLL_SPIN_US         50
    warn_after    AIOCOLL_WARN_AFTER      30
    debug         AIOCOLL_DEBUG           "off"
    verify        AIOCOLL_VERIFY          "behind"
    allow_pickle  AIOCOLL_ALLOW_PICKLE    no
    host_id       AIOCOLL_HOST_ID         none: determined from the system
    tuning        AIOCOLL_TUNING          none: the file of `aiocoll bench --tune` in the user's cache, if there is one
    dump_dir      AIOCOLL_DUMP_DIR        none: no files; SIGUSR2 prints to standard error
    stats         AIOCOLL_STATS           yes
    top_dir       AIOCOLL_TOP_DIR         none: `aiocoll top` shows nothing; `aiocoll run` sets the variable

An unknown `AIOCOLL_` variable or an invalid value raises an error that lists the allowed ones.
"""

from __future__ import annotations

import math
import os
import stat
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import Enum
from typing import Any, Final, Literal

from aiocoll.credentials import read_private, tls_files
from aiocoll.endpoints import check_ports, parse_advertised, parse_ports
from aiocoll.environment import take
from aiocoll.log import logger
from aiocoll.numerals import parse_float, parse_int, to_float, to_int
from aiocoll.transport.registry import AUTO, transports

__all__ = ["GroupOptions", "job_key", "read_key_file", "seconds"]

#: Minimum length of a job key: 128 bits cannot be guessed.
_MIN_KEY_BYTES = 16
#: Maximum length of a job key: longer than any real key, but short enough that reading a wrong file does no harm.
_MAX_KEY_BYTES = 4096

_PREFIX = "AIOCOLL_"
#: AIOCOLL_ variables that set no group option: the rendezvous, the launcher, `job_key` and the test suite read them.
_ELSEWHERE = frozenset(
    f"{_PREFIX}{name}"
    for name in (
        *("PORT", "STORE", "STORE_PORT", "SINGLETON", "JOIN", "RESTART_COUNT", "WORLD_SIZE", "SERVICE"),
        *("JOB_KEY", "JOB_KEY_FD", "JOB_KEY_FILE", "TEST_LOOP", "TEST_TIMEOUT_SCALE", "NATIVE", "SWITCH_INTERVAL"),
    )
)


class _Unset(Enum):
    UNSET = "unset"


# Typed as Any, so that an option with this default can be declared with the type that it has after `resolve`.
_UNSET: Final[Any] = _Unset.UNSET

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "encryption": ("auto", "none", "tls"),
    "debug": ("off", "detail"),
    "verify": ("behind", "before"),
}
_TRUTH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_NUMBERS: Mapping[str, Callable[[str], float]] = {
    "spin_us": parse_float,
    "warn_after": parse_float,
    "connections": parse_int,
}
_DEFAULTS: Mapping[str, Any] = {
    "transport": "auto",
    "interface": None,
    "bind": None,
    "port_range": None,
    "advertise": None,
    "connections": None,
    "single_copy": True,
    "encryption": "auto",
    "tls_ca": None,
    "tls_certificate": None,
    "tls_key": None,
    "job_id": None,
    "job_key": None,
    "spin_us": 50.0,  # two wake-ups by the kernel take as long, so longer polling costs more than suspending
    "warn_after": 30.0,  # longer than most waits without a fault, such as for checkpoints and first compilations
    "debug": "off",
    "verify": "behind",
    "allow_pickle": False,
    "host_id": None,
    "tuning": None,
    "dump_dir": None,
    "stats": True,
    "top_dir": None,
}


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class GroupOptions:
    """The options of a group. An option that is not given comes from the environment, else from the defaults.

    Attributes:
        transport: `"auto"` (the fastest available), `"tcp"`, `"unix"` (one host only), `"shm"`, or the name of a
            transport that another package registers, see `aiocoll.plugins`. It must be equal on every rank.
        interface: name of the network interface whose address this rank publishes to its peers.
        bind: local address to listen on and to publish, or `"any"` to listen on all addresses.
        port_range: the first and the last TCP port that this rank may listen on, for firewalls. Each rank of a host
            uses one port, and a second one while its group grows.
        advertise: numeric address by which ranks on other hosts reach this rank, such as `"203.0.113.5"`, if NAT
            translates it. Add a port, as in `"203.0.113.5:40000"`, if NAT also translates the port. `port_range` must
            then be the one local port to which NAT forwards.
        connections: maximum number of connections of each data link that this rank dials to another host, at least 1.
            None means as many as fill the network, at most four.
        single_copy: whether ranks of one host read large arrays directly in each other's memory. Both ranks must set
            it, and the kernel must permit it.
        encryption: `"auto"`: TLS 1.3 for connections between hosts and on all interfaces but the loopback. `"tls"`: for
            all TCP connections, also on one host. `"none"`: no encryption, if every rank has this value.
        tls_ca: path of a PEM file with the certificates of a CA. The peer of every TLS connection must then have a
            certificate of this CA that names its part in the job, see `docs/security.md`. If one rank has these three
            files, all ranks need them. They are read whenever a group is made.
        tls_certificate: path of a PEM file with the certificate of this rank, and intermediate certificates, if any.
        tls_key: path of a PEM file with the private key, without a passphrase, accessible only to this user.
        job_id: name of the job, equal on all ranks. It is used in certificates, and keeps the connections of different
            jobs separate.
        job_key: secret that all ranks of the job share, at least 16 bytes; a string is encoded as UTF-8.
        spin_us: maximum microseconds for which an await polls in one loop iteration before it suspends; 0 = no polling.
        warn_after: seconds after which a pending operation is logged with the ranks that it waits for; inf = never.
        debug: `"detail"` compares every collective on all ranks before data moves. It must be equal on every rank.
        verify: order of launch and comparison for calls that NCCL carries out. `"behind"` launches at the call and
            compares afterwards: after a mismatch the arrays are undefined. `"before"` launches after all ranks have
            made the same call; one rank with this value is enough.
        allow_pickle: whether objects that msgpack cannot encode may be sent as pickles. It must be equal on every rank.
        host_id: ranks with different values behave as if on different hosts (for tests).
        tuning: path of a file made by `aiocoll bench --tune`. Only rank 0 reads it, and sends it to the other ranks.
        dump_dir: directory for dumps of this rank's last operations, written when the group fails and on SIGUSR2; see
            `aiocoll.group.flight_recorder`.
        stats: whether this rank counts its operations, for `ProcessGroup.stats`.
        top_dir: directory, accessible only to this user, in which this process listens for `aiocoll top`. `aiocoll run`
            makes one per job.

    Raises:
        TypeError: a value has a wrong type.
        ValueError: a value is not allowed. The message lists the allowed values.
    """

    transport: Literal["auto", "tcp", "unix", "shm"] | str = _UNSET
    interface: str | None = _UNSET
    bind: str | None = _UNSET
    port_range: tuple[int, int] | None = _UNSET
    advertise: str | None = _UNSET
    connections: int | None = _UNSET
    single_copy: bool = _UNSET
    encryption: Literal["auto", "none", "tls"] = _UNSET
    tls_ca: str | None = _UNSET
    tls_certificate: str | None = _UNSET
    tls_key: str | None = _UNSET
    job_id: str | None = _UNSET
    job_key: bytes | str | None = _UNSET
    spin_us: float = _UNSET
    warn_after: float = _UNSET
    debug: Literal["off", "detail"] = _UNSET
    verify: Literal["behind", "before"] = _UNSET
    allow_pickle: bool = _UNSET
    host_id: str | None = _UNSET
    tuning: str | None = _UNSET
    dump_dir: str | None = _UNSET
    stats: bool = _UNSET
    top_dir: str | None = _UNSET

    def __post_init__(self) -> None:
        for name, value in self._explicit_values().items():
            _CHECKS[name](name, value)
            if (convert := _CONVERSIONS.get(name)) is not None and value is not None:
                object.__setattr__(self, name, convert(value))

    def __repr__(self) -> str:
        shown = (
            f"{name}={'<hidden>' if name == 'job_key' else repr(value)}"
            for name, value in self._explicit_values().items()
        )
        return f"GroupOptions({', '.join(shown)})"

    def _explicit_values(self) -> dict[str, Any]:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if value is not _UNSET}

    @classmethod
    def resolve(cls, explicit: GroupOptions | None, environ: Mapping[str, str]) -> GroupOptions:
        """Return options with every field set: from explicit values, else the environment, else the defaults.

        `job_key` does not come from the environment: the function `job_key` reads and removes it there.

        Args:
            explicit: the options of the program, or None.
            environ: the environment, such as `os.environ`.

        Returns:
            New options.

        Raises:
            ValueError: a variable is unknown, or its value is invalid. The message lists the allowed ones.
        """
        resolved = cls(**{**_DEFAULTS, **_from_environ(environ), **(explicit._explicit_values() if explicit else {})})
        _check_together(resolved.advertise, resolved.port_range)
        tls_files(resolved.tls_ca, resolved.tls_certificate, resolved.tls_key)
        return resolved


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    names = {f"{_PREFIX}{name.upper()}": name for name in _DEFAULTS if name != "job_key"}
    found = {}
    for variable in sorted(environ):
        if not variable.startswith(_PREFIX) or variable in _ELSEWHERE:
            continue
        if variable not in names:
            known = ", ".join(sorted({*names, *_ELSEWHERE}))
            raise ValueError(f"{variable}={environ[variable]!r}: unknown variable; use one of {known}")
        name = names[variable]
        value = _parse(name, variable, environ[variable])
        _CHECKS[name](variable, value)
        found[name] = value
    return found


def _parse(name: str, variable: str, text: str) -> Any:
    if name in _NUMBERS:
        try:
            return _NUMBERS[name](text)
        except ValueError:
            raise ValueError(f"{variable}={text!r}: must be a number") from None
    if name == "port_range":
        try:
            return parse_ports(text)
        except ValueError as error:
            raise ValueError(f"{variable}={text!r}: {error}") from None
    if name in ("allow_pickle", "single_copy", "stats"):
        try:
            return _TRUTH[text.lower()]
        except KeyError:
            raise ValueError(f"{variable}={text!r}: must be one of {', '.join(_TRUTH)}") from None
    return text.lower() if name in _CHOICES or name == "transport" else text


def _check_choice(option: str) -> Callable[[str, Any], None]:
    allowed = _CHOICES[option]

    def check(label: str, value: Any) -> None:
        if value not in allowed:
            raise ValueError(f"{label}={value!r}: must be one of {', '.join(map(repr, allowed))}")

    return check


def _check_transport(label: str, value: Any) -> None:
    if value == AUTO or (isinstance(value, str) and value in transports):
        return
    package = transports.packages.get(value) if isinstance(value, str) else None
    hint = "" if package is None else f"; install {package}"
    names = ", ".join(map(repr, (AUTO, *transports.names())))
    raise ValueError(f"{label}={value!r}: must be one of {names}, or a transport of an installed package{hint}")


def _check_text(label: str, value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{label} must be a str or None, not {type(value).__name__}")
    if value == "":
        raise ValueError(f"{label}='': must not be empty; leave it out instead")


def _check(label: str, value: Any, check: Callable[..., object], *arguments: Any) -> None:
    try:
        check(*arguments)
    except ValueError as error:
        raise ValueError(f"{label}={value!r}: {error}") from None


def _check_ports(label: str, value: Any) -> None:
    if value is None:
        return
    what = "a tuple of two ports, the first and the last, or None"
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"{label} must be {what}, not {value!r}")
    _check(label, value, check_ports, *(to_int(port, label, what) for port in value))


def _check_advertised(label: str, value: Any) -> None:
    _check_text(label, value)
    if value is not None:
        _check(label, value, parse_advertised, value)


def _check_connections(label: str, value: Any) -> None:
    if value is not None and to_int(value, label, "an int or None") < 1:
        raise ValueError(f"{label}={value}: must be at least 1")


def _check_together(advertise: str | None, port_range: tuple[int, int] | None) -> None:
    port = None if advertise is None else parse_advertised(advertise)[1]
    if port is not None and (port_range is None or port_range[0] != port_range[1]):
        raise ValueError(
            f"advertise={advertise!r} names a port, but port_range={port_range!r} is not one port; set "
            f"port_range=({port}, {port}), or the one local port to which NAT forwards port {port}"
        )


def _check_number(label: str, value: Any) -> None:
    if not to_float(value, label) >= 0:
        raise ValueError(f"{label}={value!r}: must be >= 0")


def _check_spin(label: str, value: Any) -> None:
    _check_number(label, value)
    if math.isinf(to_float(value, label)):
        raise ValueError(f"{label}={value!r}: must be finite; an await that polls without end blocks the event loop")


def _check_bool(label: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{label} must be True or False, not {value!r}")


def _check_key(label: str, value: Any) -> None:
    if value is not None:
        _key(label, value)


#: Conversions of options whose values may be NumPy scalars.
_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "connections": lambda value: to_int(value, "connections"),
    "port_range": lambda value: tuple(to_int(port, "port_range") for port in value),
    "spin_us": lambda value: to_float(value, "spin_us"),
    "warn_after": lambda value: to_float(value, "warn_after"),
}

_CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    **{option: _check_choice(option) for option in _CHOICES},
    "transport": _check_transport,
    "interface": _check_text,
    "bind": _check_text,
    "port_range": _check_ports,
    "advertise": _check_advertised,
    "connections": _check_connections,
    "tls_ca": _check_text,
    "tls_certificate": _check_text,
    "tls_key": _check_text,
    "job_id": _check_text,
    "host_id": _check_text,
    "tuning": _check_text,
    "dump_dir": _check_text,
    "top_dir": _check_text,
    "spin_us": _check_spin,
    "warn_after": _check_number,
    "allow_pickle": _check_bool,
    "single_copy": _check_bool,
    "stats": _check_bool,
    "job_key": _check_key,
}


def _key(label: str, value: bytes | str) -> bytes:
    if not isinstance(value, bytes | str):
        raise TypeError(f"{label} must be bytes or str, not {type(value).__name__}")
    # Python decodes environment bytes that are not UTF-8 as surrogates; this converts surrogates back to those bytes.
    key = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    if len(key) < _MIN_KEY_BYTES:
        raise ValueError(
            f"{label}: the job key has {len(key)} bytes, but at least {_MIN_KEY_BYTES} are required; make a key with "
            '`python -c "import secrets; print(secrets.token_hex(32))"`'
        )
    return key


def job_key(environ: MutableMapping[str, str], explicit: bytes | str | None) -> bytes | None:
    """Read and return the job key from the environment; None if there is none. This module keeps no copy.

    The sources are, in this order:

    - `explicit`;
    - the pipe `AIOCOLL_JOB_KEY_FD` from the launcher. It is read to its end and closed, and the variable is removed;
    - the file `AIOCOLL_JOB_KEY_FILE`;
    - the variable `AIOCOLL_JOB_KEY`. It is removed with a warning, because other users may see the environment of a
      process, and child processes inherit it. The bytes in the initial environment block are overwritten as well.

    Raises:
        TypeError: `explicit` is neither bytes nor str.
        ValueError: the key is too short, or the descriptor or file is not safe. The message names the variable.
    """
    if explicit is not None:
        return _key("job_key", explicit)
    if fd := environ.pop("AIOCOLL_JOB_KEY_FD", None):
        return _key(f"AIOCOLL_JOB_KEY_FD={fd}", _read_pipe(fd))
    if path := environ.get("AIOCOLL_JOB_KEY_FILE"):
        return read_key_file(path, "AIOCOLL_JOB_KEY_FILE")
    if (text := take(environ, "AIOCOLL_JOB_KEY")) is not None:
        logger.warning(
            "AIOCOLL_JOB_KEY was removed from the environment, where other users could have read it; "
            "prefer `aiocoll run`, or AIOCOLL_JOB_KEY_FILE"
        )
        return _key("AIOCOLL_JOB_KEY", text)
    return None


def _read_pipe(text: str) -> bytes:
    only = "only the process that `aiocoll run` started can read the key, and only once"
    started_by = sys.modules.get("multiprocessing.process")
    if started_by is not None and started_by.parent_process() is not None:
        raise ValueError(
            f"AIOCOLL_JOB_KEY_FD={text}: multiprocessing started this process, and {only}. If the program starts its "
            "ranks itself, start the program with python instead of `aiocoll run`"
        )
    try:
        fd = parse_int(text)
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):  # the number now belongs to another file
            raise OSError("not a pipe")
    except (ValueError, OverflowError, OSError) as error:
        raise ValueError(
            f"AIOCOLL_JOB_KEY_FD={text}: not a descriptor that this process inherited ({error}); {only}"
        ) from None
    with open(fd, "rb") as pipe:
        if not (key := pipe.read(_MAX_KEY_BYTES)):
            raise ValueError(f"AIOCOLL_JOB_KEY_FD={text}: another process has read the key; {only}")
        return key


def read_key_file(path: str, label: str = "job key file") -> bytes:
    """Return the key in the file `path`, without one newline at its end.

    Raises:
        ValueError: the file is missing, is a symbolic link, belongs to another user or is accessible to others, or the
            key is too short.
    """
    key = read_private(path, label, _MAX_KEY_BYTES)
    return _key(f"{label}={path!r}", key.removesuffix(b"\n").removesuffix(b"\r"))


def seconds(value: float | timedelta | None, name: str, default: float = math.inf) -> float:
    """Return the timeout `value` in seconds; `default` if it is None. inf means no timeout.

    Args:
        value: seconds, a timedelta or None.
        name: name of the argument in error messages.
        default: seconds.

    Raises:
        TypeError: `value` is not a number, a timedelta or None.
        ValueError: `value` is negative or NaN.
    """
    if value is None:
        return default
    if isinstance(value, timedelta):
        value = value.total_seconds()
    number = value if type(value) is float else to_float(value, name, "seconds, a timedelta or None")
    if not number >= 0:
        raise ValueError(f"{name}={value!r}: must be >= 0 seconds (inf = never)")
    return number
