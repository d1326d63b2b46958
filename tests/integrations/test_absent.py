"""Import errors of `aiocoll.integrations` if Ray, Dask or torch is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest

from aiocoll import BackendUnavailableError


@pytest.mark.parametrize(("name", "package"), [("ray", "ray"), ("dask", "distributed"), ("torch", "torch")])
def test_import_error_names_the_extra_to_install(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in [each for each in sys.modules if each.startswith(f"aiocoll.integrations.{name}")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BackendUnavailableError, match=rf"pip install 'aiocoll\[{name}\]'"):
        importlib.import_module(f"aiocoll.integrations.{name}")
