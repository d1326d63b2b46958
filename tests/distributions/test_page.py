"""The code and the commands on docs/plugins.md, compared with the test distributions and run."""

from __future__ import annotations

import os
from pathlib import Path

from aiocoll import plugins

from ..pages import ROOT, code, commands, files, shell, write
from .installed import HERE, install
from .test_distributions import CHECK


def test_plugin_page_shows_the_tested_packages() -> None:
    assert (
        files("docs/plugins.md")["aiocoll_shelf.py"]
        == "# aiocoll_shelf.py\n" + (HERE / "shelf/aiocoll_shelf.py").read_text()
    )
    assert code("docs/plugins.md", "A store", 1, "toml") == (HERE / "shelf/pyproject.toml").read_text()
    assert code("docs/plugins.md", "A transport") in (HERE / "rail/aiocoll_rail.py").read_text()
    compile(code("docs/plugins.md", "A transport", 2), "<page>", "exec")
    abacus = (HERE / "abacus/aiocoll_abacus.py").read_text()
    assert code("docs/plugins.md", "A device", 1) in abacus
    assert code("docs/plugins.md", "A device", 2) in abacus
    assert code("docs/plugins.md", "A device", 3).partition("\n\n\n")[2] in CHECK


def test_commands_of_the_plugin_page_print_the_shown_output(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install("shelf", site)
    write({name: text for name, text in files("docs/plugins.md").items() if name != "aiocoll_shelf.py"}, tmp_path)
    outputs = [shell(each, tmp_path, PYTHONPATH=f"{site}{os.pathsep}{ROOT}") for each in commands("docs/plugins.md")]
    assert outputs[0].startswith(code("docs/plugins.md", "A store", 1, "text"))
    assert "shelf     list the keys of a shelf" in outputs[0]
    assert "aiocoll/1/card/0" in outputs[0]
    assert " passed" in outputs[1]
    assert "failed" not in outputs[1]


def test_plugin_page_shows_the_interface_versions_of_the_registries() -> None:
    for kind, registry in (("STORE", plugins.stores), ("TRANSPORT", plugins.transports), ("COMMAND", plugins.commands)):
        assert getattr(plugins, f"{kind}_VERSION") == registry.version
