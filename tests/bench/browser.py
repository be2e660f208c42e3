"""A headless Chromium, spoken to through its DevTools protocol over a pipe: what a page shows, logs and asks for."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "google-chrome-stable")
ANSWER_S = 120
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page at a time. events: what the protocol has told since the last `open`, as it came."""

    def __init__(self, program: str, profile: Path):
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        # Chromium reads commands from file descriptor 3 and writes answers to 4.
        wired = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", wired, program, *_OPTIONS, f"--user-data-dir={profile}"], pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in, self._unread = ours_out, ours_in, b""
        self._last, self._session, self.events = 0, None, list[dict[str, Any]]()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(ANSWER_S)
        finally:
            self._process.kill()
            os.close(self._out)
            os.close(self._in)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer; raises RuntimeError for an error. What comes meanwhile goes to `events`."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._last:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page: Path, width: int, height: int, scheme: str) -> None:
        """Show a file. scheme: "light" or "dark", as the reader's system has it."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"]["value"]

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    @property
    def complaints(self) -> list[str]:
        """What the page logged or failed at, and what the browser says of it."""
        found = []
        for event in self.events:
            if event["method"] == "Log.entryAdded":
                found.append(event["params"]["entry"]["text"])
            elif event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Network.loadingFailed"):
                found.append(json.dumps(event["params"])[:200])
        return found

    @property
    def requests(self) -> list[str]:
        """Every address that was asked for."""
        sent = (event for event in self.events if event["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def _read(self) -> dict[str, Any]:
        """The next message; raises RuntimeError if none comes, so that no test hangs."""
        while b"\0" not in self._unread:
            if not select.select([self._in], [], [], ANSWER_S)[0]:
                raise RuntimeError(f"Chromium said nothing for {ANSWER_S} s")
            data = os.read(self._in, 1 << 16)
            if not data:
                raise RuntimeError("Chromium has gone")
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)
