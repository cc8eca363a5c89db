"""A headless Chromium that tests drive with the DevTools protocol, through a pair of pipes."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
AXE = Path(__file__).parents[1] / ".axe" / "axe.min.js"  # `make axe` fetches it
PATIENCE = 60.0  # seconds; a busy machine is slow
# Chromium reads commands from file descriptor 3 and answers on 4.
_LAUNCH = """
import fcntl, os, sys
given = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for number, descriptor in zip((3, 4), given):
    os.dup2(descriptor, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-extensions", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """A running Chromium, closed by its context."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        reads, self._write = os.pipe()
        self._read, writes = os.pipe()
        self.events: list[dict[str, Any]] = []
        self._buffer, self._last = b"", 0
        command = [
            sys.executable, "-S", "-E", "-c", _LAUNCH, str(reads), str(writes), CHROMIUM, *_FLAGS,
            f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        with (profile / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, pass_fds=(reads, writes), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        os.close(reads)
        os.close(writes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.command("Browser.close")
            self._process.wait(10)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def command(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events on the way are kept."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._next()
            if answer.get("id") != self._last:
                continue
            if "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            result: dict[str, Any] = answer["result"]
            return result

    def _next(self) -> dict[str, Any]:
        """Return the next message; an event is also added to `events`."""
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], PATIENCE)[0]:
                raise RuntimeError(f"chromium has not answered for {PATIENCE:g} s")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise RuntimeError("chromium has ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        values: dict[str, Any] = json.loads(message)
        if "method" in values:
            self.events.append(values)
        return values

    def open(
        self, path: Path, width: int = 1100, dark: bool = False, scripts: bool = True
    ) -> "Tab":
        """Open a file in a new tab and wait until it is loaded."""
        tab = Tab(self)
        tab.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.command("Emulation.setEmulatedMedia", media="", features=[scheme])
        tab.command("Emulation.setScriptExecutionDisabled", value=not scripts)
        tab.command("Page.navigate", url=path.resolve().as_uri())
        while not tab.events("Page.loadEventFired"):
            self._next()
        return tab


class Tab:
    """A tab of the browser."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._target = browser.command("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.command("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command to this tab."""
        return self._browser.command(method, self._session, **params)

    def events(self, *methods: str) -> list[dict[str, Any]]:
        """Return the parameters of this tab's events of these kinds."""
        return [
            event["params"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] in methods
        ]

    @property
    def problems(self) -> list[Any]:
        """Errors on the console, exceptions and violations of the page's policy.

        Warnings of the chart library are not errors.
        """
        console = self.events("Runtime.consoleAPICalled")
        other = self.events("Runtime.exceptionThrown", "Log.entryAdded", "Audits.issueAdded")
        return [event for event in console if event["type"] in ("error", "assert")] + other

    @property
    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        return [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]

    def resize(self, width: int, height: int = 900) -> None:
        """Give the tab a width; a narrow one is a phone's."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=width < 600,
        )  # fmt: skip

    def js(self, expression: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        answer = self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE
        while not self.js(condition):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {PATIENCE:g} s: {condition}")
            time.sleep(0.05)

    def move(self, x: float, y: float) -> None:
        """Point at a place of the window."""
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def wheel(self, x: float, y: float, by: float) -> None:
        """Turn the mouse's wheel at a place of the window."""
        self.command("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)

    def pdf(self) -> bytes:
        """Print the page."""
        return base64.b64decode(self.command("Page.printToPDF", printBackground=True)["data"])

    def close(self) -> None:
        """Close the tab."""
        self._browser.command("Target.closeTarget", targetId=self._target)
