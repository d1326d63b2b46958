"""Tests of pyright's "go to definition" for each call in the call diagram of docs/architecture.md."""

from __future__ import annotations

import ast
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ..test_architecture import PACKAGE, drawn_calls


class Place(NamedTuple):
    """The position of a name in a file; lines and columns count from 0."""

    path: Path
    line: int
    column: int


class Server:
    """A client of pyright's language server process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._requests = 0
        self._opened: set[Path] = set()
        root = PACKAGE.parent.as_uri()
        folders = [{"uri": root, "name": "aiocoll"}]
        self.request("initialize", processId=None, rootUri=root, workspaceFolders=folders, capabilities={})
        self._send("initialized", {})

    def definitions(self, place: Place) -> list[Place]:
        """Return the places where the name at `place` is defined."""
        uri = place.path.as_uri()
        if place.path not in self._opened:
            self._opened.add(place.path)
            document = {"uri": uri, "languageId": "python", "version": 1, "text": place.path.read_text()}
            self._send("textDocument/didOpen", {"textDocument": document})
        position = {"line": place.line, "character": place.column}
        found = self.request("textDocument/definition", textDocument={"uri": uri}, position=position) or []
        return [
            Place(Path(each["uri"].removeprefix("file://")), *each["range"]["start"].values())
            for each in found
        ]  # fmt: skip

    def request(self, method: str, **params: Any) -> Any:
        """Send a request and return its result; answer the server's own requests with empty results."""
        self._requests += 1
        self._send(method, params, id=self._requests)
        while True:
            message = self._receive()
            if "method" not in message and message.get("id") == self._requests:
                return message["result"]
            if "method" in message and "id" in message:
                count = len(message["params"].get("items", ()))
                self._write({"jsonrpc": "2.0", "id": message["id"], "result": [{}] * count or None})

    def _send(self, method: str, params: dict[str, Any], **more: int) -> None:
        self._write({"jsonrpc": "2.0", "method": method, "params": params, **more})

    def _write(self, message: dict[str, Any]) -> None:
        content = json.dumps(message).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        length = 0
        while (line := self._process.stdout.readline().strip()) or not length:
            name, _, value = line.partition(b":")
            if name == b"Content-Length":
                length = int(value)
        message: dict[str, Any] = json.loads(self._process.stdout.read(length))
        return message


@pytest.fixture
def server() -> Iterator[Server]:
    pytest.importorskip("pyright")
    command = [sys.executable, "-m", "pyright.langserver", "--stdio"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=PACKAGE.parent) as process:
        try:
            yield Server(process)
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.kill()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    """Return the functions of a module and of its classes, by their qualified names."""
    found = {}
    for node in tree(path).body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                found[f"{node.name}.{inner.name}" if isinstance(node, ast.ClassDef) else inner.name] = inner
    return found


def uses(path: Path, inside: ast.AST, *names: str) -> list[Place]:
    """Return the places in a file where one of `names` is used."""
    found = []
    for node in ast.walk(inside):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in names:
            assert isinstance(node, ast.expr)
            found.append(Place(path, (node.end_lineno or 0) - 1, (node.end_col_offset or 0) - len(name)))
    return found


def definitions_of(server: Server, place: Place) -> set[str]:
    """Return the functions to which a name refers, directly or through variables that hold functions."""
    found: set[str] = set()
    for target in server.definitions(place):
        named = [name for name, each in functions(target.path).items() if each.lineno - 1 == target.line]
        found |= set(named)
        for node in ast.walk(tree(target.path)) if not named else ():
            if not isinstance(node, ast.Assign) or node.lineno - 1 != target.line:
                continue
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(node.targets[0].elts, node.value.elts, strict=True))
            for variable, value in pairs:
                start = variable.end_col_offset or 0
                if isinstance(value, ast.Attribute) and variable.col_offset <= target.column < start:
                    found |= definitions_of(server, uses(target.path, value, value.attr)[0])
    return found


def calls() -> Iterator[tuple[str, str, str]]:
    """Yield module, caller and callee of each call in the call diagram of docs/architecture.md."""
    above: list[tuple[str, str]] = []
    for line in drawn_calls():
        depth = (len(line) - len(line.lstrip())) // 2
        module, callee = line.strip().split(": ")
        del above[depth:]
        if above:
            yield *above[-1], callee
        above.append((module, callee))


@pytest.mark.slow
def test_go_to_definition_leads_from_allreduce_to_the_link(server: Server) -> None:
    """Check that pyright finds a function with the callee's name for each call in the diagram."""
    missing, found = [], set()
    for module, caller, callee in calls():
        path, name = PACKAGE / f"{module.replace('.', '/')}.py", callee.rpartition(".")[2]
        places = [] if name.startswith("__") else uses(path, functions(path)[caller], name, f"_{name}")
        ends = {end for place in places for end in definitions_of(server, place)}
        found |= ends
        if places and name not in {end.rpartition(".")[2] for end in ends}:
            missing.append(f"{caller} -> {callee}: {ends}")
    assert not missing, "\n".join(missing)
    way = {
        "Dispatcher.one",
        "Dispatcher.start_plan",
        "Communicator.enter",
        "Operation.enter",
        "Channel.pass_on",
        "Link.write",
    }
    assert found >= way, way - found
