"""A headless Chromium for tests, controlled over its debugging pipe, and limited to loopback and files.

See the DevTools protocol: a message is JSON and a zero byte, on file descriptors 3 and 4 of the browser.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["MISSING", "SCHEMES", "WIDTHS", "Page", "browser", "executable"]

WIDTHS = {"phone": 390, "desk": 1280}
SCHEMES = ("light", "dark")
#: Reason for skipping tests without a browser.
MISSING = "no Chromium is on the PATH (apt-get install chromium): pages are not looked at in a browser"
#: The time limit, in seconds, for each reply of the browser and for each awaited condition.
PATIENCE = 60.0
#: A program that becomes the browser (`execv`). Chromium expects its debugging pipes as descriptors 3 and 4.
_EXEC = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]
for number, end in zip((3, 4), ends):
    os.dup2(end, number)
    os.close(end)
os.execv(sys.argv[3], sys.argv[3:])
"""
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-default-browser-check",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
#: JavaScript: a promise that resolves when an expression is true. The page evaluates the expression after each load and
#: each change.
_UNTIL = """new Promise(done => {
    const look = () => { if (%s) { observer.disconnect(); done(true) } }
    const observer = new MutationObserver(look)
    observer.observe(document, {subtree: true, childList: true, characterData: true, attributes: true})
    document.addEventListener("readystatechange", look)
    look()
})"""
#: JavaScript: a list of the elements that reach beyond the right edge of the window, except inside scrolling boxes.
_OUTSIDE = """[...document.querySelectorAll("%s *")].filter(each => {
    if (each.getBoundingClientRect().right <= innerWidth + 1) return false
    for (let box = each; box; box = box.parentElement)
        if (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(box).overflowX)) return false
    return true
}).map(each => each.tagName + " " + each.textContent.trim().slice(0, 60))"""


def executable() -> str | None:
    """Return the path of the browser of this machine, or None if no browser is installed."""
    return shutil.which("chromium") or shutil.which("google-chrome")


class _Pipe:
    """The pipe that carries messages to and from the browser."""

    def __init__(self, out: int, into: int) -> None:
        self._out, self._in = out, into
        self._read = b""
        self._number = 0
        #: The events that each browser session has sent, by session id.
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command to the browser; return the reply."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        text = json.dumps(message if session is None else {**message, "sessionId": session})
        _write(self._out, text.encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while True:
            answer = self._next(end, method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self, end: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{what}: no message for {PATIENCE:.0f} s"
            got = os.read(self._in, 1 << 20)
            assert got, f"{what}: the browser has ended"
            self._read += got
        text, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


class Page:
    """A web page in a separate browser window."""

    def __init__(self, pipe: _Pipe, width: int, scheme: str) -> None:
        self._pipe = pipe
        self._target = pipe.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = pipe.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._pipe.call(method, self._session, **params)

    def open(self, address: str) -> None:
        """Load a URL in the page, and wait until the page is loaded."""
        answer = self._call("Page.navigate", url=address)
        assert "errorText" not in answer, f"{address}: {answer['errorText']}"
        self.until("document.readyState == 'complete'")

    def eval(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of its promise."""
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        assert self.eval(_UNTIL % expression) is True

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all visible elements that match a selector."""
        found: list[str] = self.eval(
            f"[...document.querySelectorAll({json.dumps(selector)})].filter(each => each.checkVisibility())"
            ".map(each => each.innerText.trim())"
        )
        return found

    def hidden_elements(self, part: str = "body") -> list[str]:
        """Return the elements below a selector that reach beyond the right edge, where a user cannot see them."""
        found: list[str] = self.eval(_OUTSIDE % part)
        return found

    def console_messages(self) -> list[str]:
        """Return the JavaScript errors and the console output of the page."""
        mine = [each for each in self._pipe.events if each.get("sessionId") == self._session]
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(each["params"]) for each in mine if each["method"] in kinds]

    def loaded_urls(self) -> list[str]:
        """Return the URLs of all resources that the page has loaded."""
        mine = [each for each in self._pipe.events if each.get("sessionId") == self._session]
        return [each["params"]["request"]["url"] for each in mine if each["method"] == "Network.requestWillBeSent"]

    def save_picture(self, path: Path) -> None:
        """Save a picture of the window."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """Close the browser window of the page."""
        self._pipe.call("Target.closeTarget", targetId=self._target)


class Browser:
    """A running Chromium process, which opens pages."""

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe

    @contextmanager
    def page(self, width: int, scheme: str = "light") -> Iterator[Page]:
        """Open a page with the given width, in the colour scheme light or dark."""
        page = Page(self._pipe, width, scheme)
        yield page
        page.close()


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start the browser of this machine with a new profile in a folder, and close it after the block."""
    program = executable()
    assert program is not None, MISSING
    child_in, parent_out = os.pipe()
    parent_in, child_out = os.pipe()
    flags = [*_FLAGS, f"--user-data-dir={folder}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    command = [sys.executable, "-c", _EXEC, str(child_in), str(child_out), program, *flags, "about:blank"]
    try:
        with subprocess.Popen(
            command, pass_fds=(child_in, child_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "HOME": str(folder)},
        ) as process:  # fmt: skip
            os.close(child_in)
            os.close(child_out)
            child_in = child_out = -1
            pipe = _Pipe(parent_out, parent_in)
            try:
                yield Browser(pipe)
                pipe.call("Browser.close")
            except BaseException:
                process.kill()
                raise
    finally:
        for end in (parent_in, parent_out, child_in, child_out):
            with suppress(OSError):
                os.close(end)


def _write(end: int, data: bytes) -> None:
    while data:
        data = data[os.write(end, data) :]
