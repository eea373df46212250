"""A real browser for tests: Chromium without a window, spoken to over a pipe (the DevTools protocol)."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Self


class Browser:
    """One page of one browser. `errors`: what its console complained about, and what the page was refused."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={folder}", "--host-resolver-rules=MAP * ~NOTFOUND"]

        def pipes() -> None:
            os.dup2(to_read, 3)
            os.dup2(to_write, 4)

        self._process = subprocess.Popen(
            ["chromium", *options],
            pass_fds=(3, 4),
            preexec_fn=pipes,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(folder)},
        )
        os.close(to_read)
        os.close(to_write)
        self._rest, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        self._loaded = False
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def resize(self, width: int, height: int = 900) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def dark(self, dark: bool) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)

    def open(self, page: Path) -> float:
        """Opens a file; the seconds until it has loaded."""
        began, self._loaded = time.monotonic(), False
        self.send("Page.navigate", url=page.as_uri())
        while not self._loaded:
            self._take(self._message())
        return time.monotonic() - began

    def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, f"{script}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def until(self, script: str, limit_s: float = 20.0) -> None:
        """Waits for an expression to be true."""
        within = time.monotonic() + limit_s
        while not self.run(f"!!({script})"):
            assert time.monotonic() < within, f"not within {limit_s} s: {script}"
            time.sleep(0.02)

    def point(self, selector: str, kind: str = "mouseMoved") -> None:
        """Moves the pointer to the middle of the first such element, or presses there."""
        box = "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]"
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({selector!r});"
            f" e.scrollIntoView({{block: 'center'}}); {box} }})()"
        )
        self.send(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x,
            y=y,
            button="none" if kind == "mouseMoved" else "left",
            clickCount=1,
        )

    def click(self, selector: str) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.point(selector, kind)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._number:
            self._take(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _take(self, event: dict[str, Any]) -> None:
        method, given = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(given["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(given["args"]))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.errors.append(given["entry"]["text"])

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 20)
            assert part, "the browser is gone"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
