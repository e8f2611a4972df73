"""Objects behind an address: bytes over connections of ours, and from the library where those fail."""

from __future__ import annotations

import http.server
import io
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from stores import read

from outsize.array.store.formats.remote import RemoteNpy
from outsize.array.store.io import addresses, connections
from outsize.array.store.io.addresses import Address
from outsize.array.store.io.signing import make_signer
from outsize.core.errors import StoreError


class Web(http.server.ThreadingHTTPServer):
    """A web server of objects in memory, which can be told to misbehave."""

    daemon_threads = True

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.connections: set[int] = set()
        self.cut, self.refuse = 0, 0
        """Answers that end early, and answers with status 403, from now on."""
        super().__init__(("127.0.0.1", 0), Answers)


class Answers(http.server.BaseHTTPRequestHandler):
    """One connection to it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = (
        True  # head and body are two packets: the second would wait 40 ms for an answer to the first
    )
    server: Web

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        web, name = self.server, self.path.partition("?")[0].strip("/")
        web.asked.append(self.path)
        web.connections.add(self.client_address[1])
        data = web.objects.get(name)
        if web.refuse or data is None:
            web.refuse -= bool(web.refuse)
            self.send_response(403 if data is not None else 404)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        low, high, told = 0, len(data), self.headers.get("Range")
        if told:
            first, _, last = told.removeprefix("bytes=").partition("-")
            low, high = (int(first), min(high, int(last) + 1)) if first else (high - int(last), high)
        self.send_response(206 if told else 200)
        self.send_header("Content-Length", str(high - low))
        self.end_headers()
        if web.cut:
            web.cut -= 1
            high, self.close_connection = (low + high) // 2, True
        self.wfile.write(data[low:high])


class Library:
    """A file system as fsspec has them, with the arguments of s3fs."""

    protocol = "fake"

    def __init__(self, web: Web) -> None:
        self.web, self.signed, self.asked = web, 0, 0

    def sign(self, path: str, expiration: int) -> str:
        self.signed += 1
        return f"http://127.0.0.1:{self.web.server_address[1]}/{path}?signature={self.signed}"

    def cat_file(
        self, path: str, version_id: str | None = None, start: int | None = None, end: int | None = None
    ) -> bytes:
        assert version_id is None
        self.asked += 1
        return self._find(path)[start:end]

    def size(self, path: str) -> int:
        return len(self._find(path))

    def info(self, path: str) -> dict[str, int]:
        return {"size": self.size(path)}

    def _find(self, path: str) -> bytes:
        if path not in self.web.objects:
            raise FileNotFoundError(path)
        return self.web.objects[path]


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


VALUES = np.random.default_rng(0).normal(size=(3000, 700))


def opened(web: Web, values: Any = VALUES) -> tuple[RemoteNpy, Library]:
    file = io.BytesIO()
    np.save(file, values)
    web.objects["x.npy"] = file.getvalue()
    library = Library(web)
    return RemoteNpy("fake://x.npy", library, "x.npy"), library


def test_ranges_come_over_connections_that_stay_open_and_one_signature_serves_a_file(web: Web) -> None:
    store, library = opened(web)
    library.asked = 0
    for _ in range(2):
        np.testing.assert_array_equal(read(store), VALUES)
    np.testing.assert_array_equal(read(store, ((7, 2900), (3, 5))), VALUES[7:2900, 3:5])
    assert library.asked == 0
    assert len(web.asked) > 2900 and len(web.connections) <= 16
    assert library.signed <= 16  # one, and at most one for each thread that found none yet


@pytest.mark.parametrize("cut", [1, 2])
def test_an_answer_that_ends_early_is_completed_by_the_library(web: Web, cut: int) -> None:
    store, library = opened(web)
    before, web.cut = library.asked, cut
    np.testing.assert_array_equal(read(store), VALUES)
    assert library.asked > before and web.cut == 0


def test_a_signed_address_that_is_refused_is_signed_again(web: Web) -> None:
    store, library = opened(web, VALUES[:10])
    before, web.refuse = library.asked, 1
    np.testing.assert_array_equal(read(store), VALUES[:10])
    assert library.signed == 2 and library.asked == before


def test_only_the_library_is_asked_after_three_failures_in_a_row(web: Web) -> None:
    store, library = opened(web, VALUES[:10])
    web.refuse = 1 << 30
    for _ in range(5):
        np.testing.assert_array_equal(read(store), VALUES[:10])
    assert len(web.asked) == 2 * 3 and library.asked == 1 + 5


def test_nothing_is_asked_over_connections_of_ours_where_a_proxy_stands_between(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = opened(web, VALUES[:10])
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    np.testing.assert_array_equal(read(store), VALUES[:10])
    assert not web.asked


def test_a_file_that_became_shorter_is_one_store_error(web: Web) -> None:
    store, _ = opened(web)
    web.objects["x.npy"] = web.objects["x.npy"][:-5000]
    with pytest.raises(StoreError, match="cut short"):
        read(store)


def test_the_last_bytes_a_whole_object_and_one_that_is_missing(web: Web) -> None:
    web.objects["a/b"] = bytes(range(200))
    for library in (False, True):
        objects = Address("fake://a", Library(web), "a")
        objects._failed = addresses._FAILURES * library
        last = np.empty(20, np.uint8)
        objects.read_range("b", -20, last)
        assert last.tobytes() == bytes(range(180, 200))
        assert objects.read_whole("b", np.empty(300, np.uint8)).tobytes() == bytes(range(200))
        with pytest.raises(StoreError, match="more than any encoding"):
            objects.read_whole("b", np.empty(199, np.uint8))
        with pytest.raises(StoreError, match="cut short"):
            objects.read_range("b", 190, np.empty(20, np.uint8))
        with pytest.raises(FileNotFoundError):
            objects.read_whole("c", np.empty(10, np.uint8))


def test_an_error_on_one_lane_ends_the_others_before_it_is_raised(web: Web) -> None:
    objects, done = Address("fake://a", Library(web), "a"), []

    def work(item: int, lane: int) -> None:
        if item == 3:
            raise ValueError("three")
        done.append((item, lane))

    with pytest.raises(ValueError, match="three"):
        objects.each(work, range(10**6), 4)
    count = len(done)
    assert count < 10**6 and {lane for _, lane in done} <= set(range(4))
    assert len(done) == count


def test_connections_that_the_server_closed_meanwhile_are_opened_again(web: Web) -> None:
    web.objects["x"] = b"12345678"
    url = f"http://127.0.0.1:{web.server_address[1]}/x"
    for _ in range(3):
        answer = connections.Answer(url, 2, 4)
        out = np.empty(4, np.uint8)
        answer.take(out)
        answer._connection.sock.close()  # as if nobody had used it for long
        answer.close()
        assert out.tobytes() == b"3456"


def test_addresses_are_signed_as_the_documentation_of_s3_signs_its_example() -> None:
    query = (
        "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request"
        "&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
    )
    secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    signature = "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
    url = f"https://examplebucket.s3.amazonaws.com/test.txt?{query}&X-Amz-Signature={signature}"
    sign = make_signer(url, "test.txt", secret)
    assert sign is not None and sign("test.txt") == url
    other = sign("folder/a b+c/0")
    assert other.startswith(f"https://examplebucket.s3.amazonaws.com/folder/a%20b%2Bc/0?{query}&X-Amz-Signature=")
    assert signature not in other
    again = make_signer(other, "folder/a b+c/0", secret)
    assert again is not None and again("test.txt") == url


@pytest.mark.parametrize("change", ["secret", "key", "signature", "algorithm"])
def test_nothing_is_signed_here_that_the_library_signs_otherwise(change: str) -> None:
    query = (
        "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request"
        "&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
    )
    signature = "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
    if change == "signature":
        signature = signature[::-1]
    url = f"https://examplebucket.s3.amazonaws.com/test.txt?{query}&X-Amz-Signature={signature}"
    url = url.replace("HMAC-SHA256", "HMAC-SHA1") if change == "algorithm" else url
    secret = "another" if change == "secret" else "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    assert make_signer(url, "other.txt" if change == "key" else "test.txt", secret) is None
