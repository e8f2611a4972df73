"""A headless browser for tests of pages: Debian's chromium (or Chrome), spoken to over a pipe in the DevTools protocol.

Nothing but the standard library: the browser reads commands from its file descriptor 3 and writes answers to 4, each JSON
object ended by a zero byte. What the page logs or throws is kept, so that a test can say that there was none.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--hide-scrollbars", "--remote-debugging-pipe",
]  # fmt: skip
MISSING = "no chromium or Chrome here: apt-get install chromium"


class Browser:
    """One page in one browser process."""

    def __init__(self, folder, width=1200, height=900):
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        words = [PROGRAM, *FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"]
        joined = " ".join(f"'{word}'" for word in words)
        command = ["bash", "-c", f"exec 3<&{to_read} 4>&{to_write}; exec {joined}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=(to_read, to_write), start_new_session=True, **quiet)
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self.session = b"", 0, None
        self.problems, self.requests, self._events = [], [], set()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(Exception):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        os.close(self._write)
        os.close(self._read)

    def call(self, method, **params):
        """One command and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self.session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self.session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._take(answer)

    def _next(self, seconds=60):
        until = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser has ended"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _take(self, event):
        name, params = event.get("method"), event.get("params", {})
        self._events.add(name)
        if name == "Runtime.exceptionThrown":
            self.problems.append(
                params["exceptionDetails"].get("text", "") + str(params["exceptionDetails"].get("exception"))
            )
        elif name == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif name == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))
        elif name == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def go(self, path):
        """Load a file of any kind, and wait until it was painted."""
        self._events.clear()
        self.call("Page.navigate", url=f"file://{path}")
        while "Page.loadEventFired" not in self._events:
            self._take(self._next())
        self.settle()

    def open(self, path):
        """Load a page of ours; returns the seconds until its script has run and it was painted."""
        begin = time.perf_counter()
        self.go(path)
        ready = self.evaluate("document.body.dataset.ready")
        seconds = time.perf_counter() - begin
        assert ready == "yes", "the script of the page did not run to its end"
        return seconds

    def evaluate(self, expression):
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def box(self, selector):
        """(left, top, width, height) of an element in the window, after it was scrolled into view."""
        place = (
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}}); "
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
        )
        return self.evaluate(place)

    def mouse(self, kind, x, y, **more):
        """`mouseMoved`, `mousePressed`, `mouseReleased` or `mouseWheel`."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def settle(self):
        """Wait until what was asked for is painted."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def screenshot(self, path, whole=False, height=None):
        """A picture of the window, or of the whole page: PNG, or WebP by the name."""
        params = {"format": "webp", "quality": 80} if str(path).endswith(".webp") else {"format": "png"}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": min(height or 4000, size["height"]), "scale": 1}
            params |= {"clip": clip, "captureBeyondViewport": True}
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("Page.captureScreenshot", **params)["data"]))

    def dark(self, on=True):
        """Let the page believe in a dark or light screen."""
        value = "dark" if on else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])
