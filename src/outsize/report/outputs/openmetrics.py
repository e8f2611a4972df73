"""The newest sample as OpenMetrics text on a port, for Prometheus: `outsize watch --metrics :9400`.

A port alone listens on this machine only. `0.0.0.0:9400` is open to the network, which then reads the numbers and the name
of the command.
"""

from __future__ import annotations

import contextlib
import http.server
import threading

from outsize.core.errors import InputError, StoreError
from outsize.core.noun import Noun
from outsize.core.outcomes.recording import Finding, Sample
from outsize.report.outputs.numbers import HELP, Number, numbers

TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def to_text(sample: Sample | None, findings: int = 0) -> str:
    """A sample in the OpenMetrics format; without one only the number of findings."""
    rows: dict[str, list[str]] = {}
    for number in numbers(sample) if sample is not None else ():
        rows.setdefault(number.name, []).append(_row(number))
    lines = []
    for name, values in rows.items():
        unit = name.rpartition("_")[2]
        lines += [f"# TYPE outsize_{name} gauge"]
        lines += [f"# UNIT outsize_{name} {unit}"] if unit in ("bytes", "ratio") else []
        lines += [f"# HELP outsize_{name} {HELP[name]}", *values]
    lines += [
        "# TYPE outsize_growing gauge", "# HELP outsize_growing things that grow step after step", f"outsize_growing {findings}",
        "# EOF",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _row(number: Number) -> str:
    labels = ",".join(f'{name}="{_escape(value)}"' for name, value in number.labels)
    return f"outsize_{number.name}{f'{{{labels}}}' if labels else ''} {number.value:.12g}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class MetricsServer(contextlib.AbstractContextManager["MetricsServer"]):
    """A listener that answers `GET /metrics` with the newest sample, from a thread of its own, until `close()`."""

    def __init__(self, address: str) -> None:
        host, port = parse_address(address)
        self._sample: Sample | None = None
        self._findings: set[tuple[str, str, str | None]] = set()
        try:
            self._server = http.server.ThreadingHTTPServer((host, port), self._handler())
        except OSError as error:
            raise StoreError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port"
            ) from None
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="outsize-metrics", daemon=True).start()

    def __call__(self, item: Noun) -> None:
        """Take what a watch says."""
        if isinstance(item, Sample):
            self._sample = item
        elif isinstance(item, Finding):
            culprit = (item.kind, item.device, item.name)
            (self._findings.discard if item.ended else self._findings.add)(culprit)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                known = self.path.partition("?")[0] in ("/metrics", "/")
                text = to_text(server._sample, len(server._findings)).encode() if known else b"see /metrics\n"
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", TYPE if known else "text/plain")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing: the screen belongs to the watch."""

        return Handler


def parse_address(address: str) -> tuple[str, int]:
    """`:9400` -> this machine only; `0.0.0.0:9400`, `[::1]:9400` as they say."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise InputError(f"{address!r} is no address: write :9400, or 0.0.0.0:9400 to be seen from other machines")
    return host.strip("[]") or "127.0.0.1", int(port)
