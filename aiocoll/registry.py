"""`Registry`: the implementations of one interface, registered by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from aiocoll.errors import AiocollError, BackendUnavailableError
from aiocoll.loading import loading

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["Registry", "load_shipped", "shipped"]

T = TypeVar("T")

#: Name of the module that registers the implementations of this package; None if it has done so. `import aiocoll` sets
#: the name, since base and core do not know that module. The module is imported at the first use of a registry.
shipped: str | None = None


def load_shipped() -> None:
    """Register the implementations of this package, unless they are registered."""
    name = shipped  # another thread may set it to None meanwhile
    if name is not None:
        with loading("registries"):
            import_module(name)


class Registry(Generic[T]):
    """A registry of one interface's implementations by name, each imported on first use.

    For an unknown name, the entry points ``aiocoll.KINDs`` are read. The entry point of a name refers to a function
    that takes this registry and calls `register`.

    Args:
        kind: the noun in error messages, such as "store".
        version: version of the interface. Implementations of other versions are rejected.

    Attributes:
        kind, version: the arguments.
        packages: the distribution to install for a name that is not registered, by name.
    """

    def __init__(self, kind: str, version: int) -> None:
        self.kind = kind
        self.version = version
        self.packages: dict[str, str] = {}
        self._targets: dict[str, T | str] = {}
        self._has_read: set[str] = set()

    def register(self, name: str, target: T | str, *, version: int) -> None:
        """Register an implementation by name. It replaces an earlier implementation with the same name.

        Args:
            name: the name that users write, in lower case.
            target: the implementation, or "module:attribute", which is imported on first use.
            version: version of the interface for which it was written.

        Raises:
            TypeError: `name` is not a str.
            ValueError: `name` is empty or not in lower case, or `version` differs from the version of this registry.
        """
        load_shipped()
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, not {type(name).__name__}")
        if not name or name != name.lower():
            raise ValueError(f"name={name!r}: must be a name in lower case")
        if version != self.version:
            raise ValueError(
                f"{self.kind} {name!r} was written for version {version} of the {self.kind} interface, but this "
                f"aiocoll has version {self.version}; install matching releases of both"
            )
        self._targets[name] = target

    def register_all(self, targets: Mapping[str, T | str], *, version: int) -> None:
        """Register several implementations by name.

        Args:
            targets: an implementation, or "module:attribute", by name.
            version: version of the interface for which they were written.

        Raises:
            ValueError: for the same reasons as `register`.
        """
        for name, target in targets.items():
            self.register(name, target, version=version)

    def unregister(self, name: str) -> None:
        """Remove the implementation of a name. The next use of the name reads its entry points again.

        Args:
            name: name of the implementation; may be unknown.
        """
        load_shipped()
        self._targets.pop(name, None)
        self._has_read.discard(name)

    def names(self) -> list[str]:
        """Return the registered names, in the order of their registration."""
        load_shipped()
        return list(self._targets)

    def __contains__(self, name: str) -> bool:
        """Return whether the name has an implementation. An unregistered name is looked up in the entry points."""
        load_shipped()
        return name in self._targets or self._read_entry_point(name)

    def get(self, name: str) -> T:
        """Import and return the implementation of a name.

        Raises:
            ValueError: there is no such implementation. The message lists the names, or the package to install.
            BackendUnavailableError: the implementation cannot be imported.
        """
        if name not in self:
            package = self.packages.get(name)
            hint = f"install {package}" if package else f"use {', '.join(self._targets) or 'none'}"
            raise ValueError(f"{self.kind} {name!r} is not known; {hint}")
        target = self._targets[name]
        if isinstance(target, str):
            module, _, attribute = target.partition(":")
            with loading(f"{self.kind} {name!r}"):
                target = cast("T", getattr(import_module(module), attribute))
            self._targets[name] = target
        return target

    def discover(self) -> list[AiocollError]:
        """Register the implementations that installed packages declare as entry points.

        Returns:
            The errors of entry points that failed.
        """
        from importlib.metadata import entry_points

        load_shipped()
        errors = []
        for point in entry_points(group=f"aiocoll.{self.kind}s"):
            if point.name not in self._targets:
                try:
                    self._provide(point)
                except AiocollError as error:
                    errors.append(error)
        return errors

    def _read_entry_point(self, name: str) -> bool:
        """Call the entry points for `name`, which should register it; return whether it is registered now."""
        if name in self._has_read:
            return False
        from importlib.metadata import entry_points  # imported here: it takes 20 ms, and few programs need it

        for point in entry_points(group=f"aiocoll.{self.kind}s", name=name):
            self._provide(point)
        self._has_read.add(name)  # last, so that another thread does not see the name as unknown in the meantime
        return name in self._targets

    def _provide(self, point: EntryPoint) -> None:
        try:
            register: Callable[[Registry[T]], None] = point.load()
            register(self)
        except AiocollError:
            raise
        except Exception as error:
            package = "" if point.dist is None else f" of {point.dist.name}"
            raise BackendUnavailableError(
                f"the entry point {point.value!r}{package} did not register {self.kind} {point.name!r}: {error}"
            ) from error
