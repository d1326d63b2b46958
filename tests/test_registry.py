"""`Registry`: registration, interface versions, imports on first use, and entry points of plugins."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aiocoll.errors import BackendUnavailableError
from aiocoll.registry import Registry

VERSION = 3


@pytest.fixture
def registry() -> Registry[object]:
    made: Registry[object] = Registry("gadget", VERSION)
    made.register("decimal", "decimal:Decimal", version=VERSION)
    made.register("absent", "no_such_module:thing", version=VERSION)
    made.packages["other"] = "gadgets-extra"
    return made


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder on the import path with a distribution that has one valid and two failing entry points."""
    monkeypatch.syspath_prepend(str(tmp_path))
    info = tmp_path / "gadgets-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gadgets\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[aiocoll.gadgets]\n"
        "round = test_gadgets:register\nold = test_gadgets:register_old\nlost = test_gadgets:missing\n"
    )
    (tmp_path / "test_gadgets.py").write_text(
        f"def register(registry):\n    registry.register('round', dict, version={VERSION})\n\n\n"
        f"def register_old(registry):\n    registry.register('old', dict, version={VERSION - 1})\n"
    )
    yield tmp_path
    sys.modules.pop("test_gadgets", None)


def test_registry_imports_an_implementation_on_first_use(
    registry: Registry[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "decimal", raising=False)
    assert "decimal" in registry
    assert "decimal" not in sys.modules
    found = registry.get("decimal")
    assert found is sys.modules["decimal"].Decimal
    assert registry.get("decimal") is found


def test_registry_replaces_an_earlier_registration_of_the_same_name(registry: Registry[object]) -> None:
    registry.register("decimal", int, version=VERSION)
    assert registry.get("decimal") is int
    assert registry.names() == ["decimal", "absent"]


def test_registry_error_names_a_module_that_is_not_installed(registry: Registry[object]) -> None:
    for _ in range(2):
        with pytest.raises(BackendUnavailableError, match="gadget 'absent' need: No module named 'no_such_module'"):
            registry.get("absent")


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_registry_refuses_another_interface_version(version: int, registry: Registry[object]) -> None:
    with pytest.raises(ValueError, match=f"'new' was written for version {version} .* has version {VERSION}"):
        registry.register("new", dict, version=version)
    assert "new" not in registry


@pytest.mark.parametrize("name", ["", "Tcp"])
def test_registry_refuses_an_invalid_name(name: str, registry: Registry[object]) -> None:
    with pytest.raises(ValueError, match="lower case"):
        registry.register(name, dict, version=VERSION)


def test_registry_refuses_a_name_that_is_not_a_string(registry: Registry[object]) -> None:
    with pytest.raises(TypeError, match="must be a str, not int"):
        registry.register(1, dict, version=VERSION)  # type: ignore[arg-type]


def test_registry_error_for_an_unknown_name_lists_the_known_names(registry: Registry[object]) -> None:
    with pytest.raises(ValueError, match="gadget 'none' is not known; use decimal, absent"):
        registry.get("none")


def test_registry_error_for_the_name_of_a_known_package_names_the_package(registry: Registry[object]) -> None:
    with pytest.raises(ValueError, match="gadget 'other' is not known; install gadgets-extra"):
        registry.get("other")


@pytest.mark.usefixtures("site")
def test_registry_finds_an_unknown_name_by_its_entry_point(registry: Registry[object]) -> None:
    assert registry.get("round") is dict


@pytest.mark.usefixtures("site")
def test_registry_reads_no_entry_point_for_a_registered_name(registry: Registry[object]) -> None:
    registry.register("round", list, version=VERSION)
    assert registry.get("round") is list
    assert "test_gadgets" not in sys.modules


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("name", "cause"), [("old", f"written for version {VERSION - 1}"), ("lost", "no attribute 'missing'")]
)
def test_registry_error_names_the_distribution_of_a_failing_entry_point(
    name: str, cause: str, registry: Registry[object]
) -> None:
    with pytest.raises(BackendUnavailableError, match=f"of gadgets did not register gadget '{name}': .*{cause}"):
        registry.get(name)


@pytest.mark.usefixtures("site")
def test_registry_raises_the_error_of_a_failing_entry_point_at_each_lookup(registry: Registry[object]) -> None:
    for _ in range(2):
        with pytest.raises(BackendUnavailableError, match="did not register gadget 'lost'"):
            registry.get("lost")


@pytest.mark.usefixtures("site")
def test_registry_lets_two_threads_look_up_an_entry_point_at_once(
    registry: Registry[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = threading.Barrier(2, timeout=10)
    provide = Registry._provide

    def provide_together(self: Registry[object], point: object) -> None:
        barrier.wait()
        provide(self, point)  # type: ignore[arg-type]

    monkeypatch.setattr(Registry, "_provide", provide_together)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(registry.get, ["round"] * 2)) == [dict, dict]


@pytest.mark.usefixtures("site")
def test_registry_discovery_registers_all_entry_points_that_can_be_loaded(registry: Registry[object]) -> None:
    errors = registry.discover()
    assert registry.names() == ["decimal", "absent", "round"]
    assert sorted(str(error).split("gadget ")[1][:6] for error in errors) == ["'lost'", "'old':"]


@pytest.mark.usefixtures("site")
def test_registry_looks_up_an_unregistered_name_by_its_entry_point(registry: Registry[object]) -> None:
    registry.register("round", list, version=VERSION)
    registry.unregister("round")
    assert registry.get("round") is dict
    registry.unregister("unknown")
