"""A headless Chromium that tests can drive: the DevTools protocol over a pipe, as far as the tests need it."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# A laptop and a phone.
LAPTOP, PHONE = (1280, 800), (390, 844)


def chromium() -> str | None:
    """Where the browser is, if there is one; the variable CHROMIUM goes before what is installed."""
    named = os.environ.get("CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """The other end of the pipe: messages are JSON, each ended by a zero byte."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._write, self._read = to_browser, from_browser
        self._buffer, self._count = b"", 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The answer to a command; events that come before it are kept."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._write, content) :]
        while True:
            found = self._message(time.monotonic() + 30)
            if found.get("id") == self._count:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                result: dict[str, Any] = found["result"]
                return result
            self.events.append(found)

    def wait(self, method: str, session: str, seconds: float = 20.0) -> dict[str, Any]:
        """The next event of this name, which is taken out of those that were kept."""
        end = time.monotonic() + seconds
        while True:
            for index, event in enumerate(self.events):
                if event.get("method") == method and event.get("sessionId") == session:
                    return self.events.pop(index)
            self.events.append(self._message(end))

    def _message(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium did not answer in time.")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise EOFError("Chromium has ended.")
            self._buffer += piece
        first, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(first)
        return found


class Tab:
    """One page: what it does, what it shows, and what went wrong in it."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session: str = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def screen(self, size: tuple[int, int] = LAPTOP, dark: bool = False, touch: bool = False, media: str = "") -> None:
        """Before opening: how large the window is, and what its user prefers."""
        width, height = size
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def open(self, path: Path, scripts: bool = True) -> None:
        """Show a file, and wait until it is loaded; events of pages before are forgotten."""
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Page.navigate", url="about:blank")
        self.browser.wait("Page.loadEventFired", self.session)
        self.browser.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.browser.wait("Page.loadEventFired", self.session)

    def __call__(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description", expression))
        return found["result"].get("value")

    def settled(self) -> None:
        """Two frames later: what was asked for is drawn."""
        self("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settled()

    def tap(self, x: float, y: float) -> None:
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.settled()

    def press(self, key: str) -> None:
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "End": 35}
        text = {"Enter": "\r"}.get(key, "")
        code = codes[key]
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)
        self.settled()

    def picture(self, path: Path, whole: bool = True) -> None:
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def printed(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False, preferCSSPageSize=False)["data"])

    def wrongs(self) -> list[str]:
        """Errors and warnings of the page since it was opened."""
        self.settled()
        found = []
        for event in self.browser.events:
            params = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    found.append(str(params["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                    found.append(str(params["args"]))
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    found.append(str(params["entry"]))
        return found

    def requests(self) -> list[str]:
        """What the page asked for since it was opened, itself and data inside of it left out."""
        urls = [
            event["params"]["request"]["url"]
            for event in self.browser.events
            if event.get("method") == "Network.requestWillBeSent" and event["params"].get("type") != "Document"
        ]
        return [url for url in urls if not url.startswith("data:")]


@contextmanager
def browsing(program: str) -> Iterator[Browser]:
    """A browser that is ended when the work is done."""
    (ours_in, theirs_out), (theirs_in, ours_out) = os.pipe(), os.pipe()
    # Chromium reads from 3 and writes to 4: from numbers above these, the shell can put them there in any order.
    high_in, high_out = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out))
    for fd in (theirs_in, theirs_out):
        os.close(fd)
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = [
            "--headless=new",
            "--no-sandbox",  # which root cannot have
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        process = subprocess.Popen(
            [
                "/bin/bash",
                "-c",
                f'exec "$@" 3<&{high_in} 4>&{high_out} {high_in}<&- {high_out}>&-',
                "bash",
                program,
                *options,
            ],
            pass_fds=(high_in, high_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(high_in)
        os.close(high_out)
        try:
            browser = Browser(ours_out, ours_in)
            yield browser
        finally:
            try:
                browser.call("Browser.close")
                process.wait(10)
            except (OSError, EOFError, TimeoutError, subprocess.TimeoutExpired):
                process.kill()
                process.wait()
            os.close(ours_in)
            os.close(ours_out)
