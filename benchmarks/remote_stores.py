"""Arrays behind an address against bare readers of the same ranges: one local server that speaks S3, and one plain web server.

    python benchmarks/remote_stores.py [--mib 256] [--rounds 5] [--connections 16]

Needs moto[server], boto3, s3fs, zarr; obstore is measured where it is installed. Everything is read from servers of this machine,
so both ends share its processors. Bare readers are threads that fetch the same bytes and drop them. Ours reads into the engine's
memory and adds up. The best round of each counts; rounds take turns. Processor seconds are of the reading process, those of
the server beside them; a reader's threads are as many as its connections. moto
reads all of an object for each range of it, so the .npy file there is small; the plain web server sends what is asked for.
"""

from __future__ import annotations

import argparse
import functools
import http.client
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

RANGE = 4 << 20
Ranges = list[tuple[str, int, int]]
"""(name of an object, first byte, end)."""


def start(*arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """A server on a port of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = [each.replace("PORT", str(port)) for each in arguments]
    server = subprocess.Popen([sys.executable, *told], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            return server, port
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")


WEB = """
import asyncio, sys
from aiohttp import web
app = web.Application()
app.router.add_static("/", sys.argv[1])
web.run_app(app, host="127.0.0.1", port=int(sys.argv[2]), print=None)
"""


def seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Bare:
    """Readers that fetch ranges and drop them."""

    def __init__(self, client: Any, connections: int) -> None:
        self.client, self.connections = client, connections
        self.pool = ThreadPoolExecutor(connections)
        self.local = threading.local()

    def http(self, urls: dict[str, str], ranges: Ranges) -> None:
        """The standard library's connections, kept open, addresses signed before."""

        def fetch(row: tuple[str, int, int]) -> None:
            name, low, high = row
            parts = urllib.parse.urlsplit(urls[name])
            connection = getattr(self.local, "connection", None)
            if connection is None or (connection.host, connection.port) != (parts.hostname, parts.port):
                connection = self.local.connection = http.client.HTTPConnection(parts.hostname, parts.port)  # type: ignore[arg-type]
            connection.request("GET", f"{parts.path}?{parts.query}", headers={"Range": f"bytes={low}-{high - 1}"})
            out, done = bytearray(high - low), 0
            answer = connection.getresponse()
            while done < len(out):
                done += answer.readinto(memoryview(out)[done:])
            answer.read()

        list(self.pool.map(fetch, ranges))

    def decoding(self, urls: dict[str, str], ranges: Ranges) -> None:
        """The same, and each object is decoded where it came."""
        from numcodecs import Zstd

        codec = Zstd()

        def fetch(row: tuple[str, int, int]) -> None:
            with urllib.request.urlopen(urls[row[0]]) as answer:
                codec.decode(answer.read())

        list(self.pool.map(fetch, ranges))

    def decoding_shards(self, urls: dict[str, str], ranges: Ranges) -> None:
        """Whole shards, of which every chunk is decoded where its index says that it lies."""
        from numcodecs import Zstd

        codec = Zstd()

        def fetch(name: str) -> None:
            with urllib.request.urlopen(urls[name]) as answer:
                data = memoryview(answer.read())
            chunks = (16 << 20) // (256 << 10)
            index = np.frombuffer(data[-16 * chunks - 4 : -4], "<u8").reshape(-1, 2)
            for start, length in index.tolist():
                if start < len(data):
                    codec.decode(data[start : start + length])

        list(self.pool.map(fetch, dict.fromkeys(name for name, _, _ in ranges)))

    def boto3(self, ranges: Ranges) -> None:
        def fetch(row: tuple[str, int, int]) -> None:
            name, low, high = row
            answer = self.client.get_object(Bucket="bucket", Key=name, Range=f"bytes={low}-{high - 1}")
            assert len(answer["Body"].read()) == high - low

        list(self.pool.map(fetch, ranges))

    def s3fs(self, ranges: Ranges) -> None:
        import s3fs

        names, low, high = zip(*((f"bucket/{name}", a, b) for name, a, b in ranges), strict=True)
        files = s3fs.S3FileSystem()
        for at in range(0, len(names), self.connections):
            rows = slice(at, at + self.connections)
            files.cat_ranges(list(names[rows]), list(low[rows]), list(high[rows]), on_error="raise")

    def obstore(self, ranges: Ranges) -> None:
        import obstore
        from obstore.store import S3Store

        store = S3Store("bucket")

        def fetch(row: tuple[str, int, int]) -> None:
            assert len(obstore.get_range(store, row[0], start=row[1], end=row[2])) == row[2] - row[1]

        list(self.pool.map(fetch, ranges))


def seconds_of(server: int) -> float:
    """Processor seconds of a server."""
    fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def race(readers: dict[str, Callable[[], Any]], fetched: int, rounds: int, server: int) -> None:
    """Best rate and least processor seconds of each, in turns; and what the server took meanwhile."""
    clock, used, served = (dict.fromkeys(readers, 1e9) for _ in range(3))
    for reader in readers.values():
        reader()
    for _ in range(rounds):
        for name, reader in readers.items():
            began, spent, gave = time.perf_counter(), seconds(), seconds_of(server)
            reader()
            clock[name] = min(clock[name], time.perf_counter() - began)
            used[name] = min(used[name], seconds() - spent)
            served[name] = min(served[name], seconds_of(server) - gave)
    for name in readers:
        rate = fetched / 2**20 / clock[name]
        print(f"  {name:28} {rate:8.0f} MiB/s  {used[name]:6.3f} s of a processor, the server {served[name]:5.2f} s")
    for ours in ("ours, read", "ours, x.sum()"):
        for what, best in (("the clock", clock), ("our processor", used)):
            shares = (
                f"{name} {100 * best[name] / best[ours]:.0f} %" for name in readers if not name.startswith("ours")
            )
            print(f"  {ours} by {what}, of: {', '.join(shares)}", flush=True)


def read_all(store: Any, budget: int) -> None:
    """Every row, in pieces of 16 MiB at most, by two threads, as a pass reads them."""
    from outsize.engine.pool import make_buffer

    row = store.bytes_of(((0, 1), *((0, n) for n in store.shape[1:])))
    step = max(1, (16 << 20) // row // store.granule[0]) * store.granule[0]
    regions = [
        ((low, min(store.shape[0], low + step)), *((0, n) for n in store.shape[1:]))
        for low in range(0, store.shape[0], step)
    ]
    local = threading.local()

    def read(region: Any) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = make_buffer(max(store.most(each) for each in regions))
        store.read(region, local.buffer)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, regions))


def measure(
    title: str, path: str, ranges: Ranges, urls: dict[str, str], bare: Bare, rounds: int, want: Any, server: int
) -> None:
    import outsize
    from outsize.array.store.registry import open_store

    fetched = sum(high - low for _, low, high in ranges)
    print(f"{title}: {fetched / 2**20:.0f} MiB in {len(ranges)} requests", flush=True)
    x, store = outsize.open(path), open_store(path)
    assert np.array_equal(x[: len(want)].compute("512MiB"), want)
    readers: dict[str, Callable[[], Any]] = {
        "ours, read": functools.partial(read_all, store, 512 << 20),
        "ours, x.sum()": functools.partial(x.sum().compute, "512MiB"),
        "bare http.client": functools.partial(bare.http, urls, ranges),
    }
    if title.endswith("zstd"):
        decoding = bare.decoding_shards if "shards" in title else bare.decoding
        readers["bare http and zstd"] = functools.partial(decoding, urls, ranges)
    if path.startswith("s3"):
        readers |= {
            "bare boto3": functools.partial(bare.boto3, ranges),
            "bare s3fs": functools.partial(bare.s3fs, ranges),
        }
        try:
            import obstore  # noqa: F401

            readers["bare obstore"] = functools.partial(bare.obstore, ranges)
        except ImportError:
            pass
    race(readers, fetched, rounds, server)


def whole(client: Any, prefix: str) -> Ranges:
    """Every object below a prefix that holds data, whole."""
    found = client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
    rows = [row for page in found for row in page.get("Contents", ())]
    return [(row["Key"], 0, row["Size"]) for row in rows if not row["Key"].endswith("zarr.json")]


def cut(ranges: Ranges) -> Ranges:
    """The same bytes in requests of at most 4 MiB."""
    return [(name, at, min(high, at + RANGE)) for name, low, high in ranges for at in range(low, high, RANGE)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--only", default="", help="forms whose name has this in it")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        s3, port = start("-m", "moto.server", "-p", "PORT")
        web, web_port = start("-c", WEB, folder, "PORT")
        try:
            os.environ |= {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
                "AWS_DEFAULT_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
            }  # fmt: skip
            run(told, Path(folder), web_port, s3.pid, web.pid)
        finally:
            s3.kill()
            web.kill()


def run(told: Any, folder: Path, web_port: int, s3: int, web: int) -> None:
    import boto3
    import zarr
    from botocore.config import Config

    client = boto3.client("s3", config=Config(max_pool_connections=told.connections, signature_version="s3v4"))
    client.create_bucket(Bucket="bucket")
    bare = Bare(client, told.connections)
    rows = told.mib << 10 >> 1  # of 512 float32
    noise = np.random.default_rng(0)
    values = np.round(noise.normal(size=(rows, 512)), 3).astype("f4")
    want = values[:1000]
    np.save(folder / "x.npy", values)
    np.save(folder / "small.npy", values[: rows // 8])
    client.put_object(Bucket="bucket", Key="x.npy", Body=(folder / "small.npy").read_bytes())
    forms: dict[str, dict[str, Any]] = {
        "chunks of 4 MiB, as they are": {"chunks": (2048, 512), "compressors": None},
        "chunks of 4 MiB, zstd": {"chunks": (2048, 512)},
        "chunks of 256 KiB, as they are": {"chunks": (128, 512), "compressors": None},
        "shards of 16 MiB, chunks of 256 KiB, as they are": {"chunks": (128, 512), "shards": (8192, 512), "compressors": None},
        "shards of 16 MiB, chunks of 256 KiB, zstd": {"chunks": (128, 512), "shards": (8192, 512)},
    }  # fmt: skip
    for number, (title, options) in enumerate(forms.items()):
        if told.only not in f"S3 zarr, {title}":
            continue
        zarr.create_array(f"s3://bucket/{number}.zarr", shape=values.shape, dtype="f4", **options)[...] = values
        ranges = whole(client, f"{number}.zarr/")
        ranges = cut(ranges) if "shards" in options else ranges
        urls = {name: signed(client, name) for name, _, _ in ranges}
        measure(f"S3 zarr, {title}", f"s3://bucket/{number}.zarr", ranges, urls, bare, told.rounds, want, s3)
    size = (folder / "small.npy").stat().st_size
    measure(
        "S3 .npy",
        "s3://bucket/x.npy",
        cut([("x.npy", 0, size)]),
        {"x.npy": signed(client, "x.npy")},
        bare,
        told.rounds,
        want,
        s3,
    )
    size = (folder / "x.npy").stat().st_size
    url = f"http://127.0.0.1:{web_port}/x.npy"
    measure("http .npy", url, cut([("x.npy", 0, size)]), {"x.npy": url}, bare, told.rounds, want, web)


def signed(client: Any, name: str) -> str:
    return str(client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": name}, ExpiresIn=3600))


if __name__ == "__main__":
    main()
