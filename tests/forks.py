"""Fresh processes without the time of their imports: forks of a server that has imported them and done nothing else.

`start(program, *arguments)` runs a script or a piece of code as `python program ...` would, in a fork of its own. It counts as
fresh where growth is measured from its own start: the kernel sets the peak of a fork to what it holds then. It is not for
proofs about imports, the command line or a control group (what was imported is charged to the server): those take real
processes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import zlib
from pathlib import Path

IMPORTED = ("numpy", "outsize.array", "outsize.array.run.execute")
TORCH = (
    "torch", "torch._dynamo", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.device_mesh",
    "outsize.model.estimation.job", "outsize.model.fitting.binding", "outsize.model.scripts.follower",
    "outsize.model.scripts.stand_ins", "outsize.model.scripts.outside",
)  # fmt: skip
"""For processes that train or trace, one or many: these imports take seconds."""


class Child:
    """A forked process, with the part of `subprocess.Popen` that tests use."""

    def __init__(
        self, program: str | Path, arguments: tuple[str, ...], line: socket.socket, environment: dict[str, str]
    ) -> None:
        self._out, self._err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        reply, write = os.pipe()
        given = {
            "program": str(program),
            "arguments": arguments,
            "folder": os.getcwd(),
            "environment": environment,
        }
        fds = [self._out.fileno(), self._err.fileno(), write]
        socket.send_fds(line, [json.dumps(given).encode()], fds)
        os.close(write)
        self._reply = os.fdopen(reply)
        self.pid = int(self._reply.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, None as long as it runs."""
        if self.returncode is None and select.select([self._reply], [], [], 0)[0]:
            self.returncode = int(self._reply.readline())
        return self.returncode

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self) -> tuple[str, str]:
        """Wait for its end; what it printed and what it complained of."""
        if self.returncode is None:
            self.returncode = int(self._reply.readline())
        texts = []
        for file in (self._out, self._err):
            file.seek(0)
            texts.append(file.read())
            file.close()
        self._reply.close()
        return texts[0], texts[1]


def start(
    program: str | Path, *arguments: str | Path, imported: tuple[str, ...] = IMPORTED,
    environment: dict[str, str] | None = None, settings: tuple[tuple[str, str], ...] = (),
) -> Child:  # fmt: skip
    """Run a script (a path) or code (a text) in a fork of a process that has `imported` these modules. `settings`: variables
    that the C library reads when a process begins."""
    given = dict(environment or os.environ) | dict(settings)
    return Child(program, tuple(map(str, arguments)), _server(imported, settings), given)


@functools.cache
def _server(imported: tuple[str, ...], settings: tuple[tuple[str, str], ...]) -> socket.socket:
    """A line to the server with these imports. All processes of one run of the tests share it, since some imports take
    seconds; who comes first starts it, and it ends
    when all lines are closed."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    kind = zlib.crc32(repr((imported, settings)).encode())
    name = f"\0outsize-forks-{run}-{kind}"  # an abstract name, which vanishes with its socket
    line = None
    while line is None:
        line = _connect(name) or _open(name, imported, dict(settings))
    atexit.register(line.close)
    return line


def _connect(name: str) -> socket.socket | None:
    """A line to a server that is there."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.connect(name)
    except ConnectionRefusedError:
        line.close()
        return None
    return line


def _open(name: str, imported: tuple[str, ...], settings: dict[str, str]) -> socket.socket | None:
    """A line to a server that is started now: its door is open before it is there; None where another was faster."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        try:
            door.bind(name)
        except OSError:
            return None
        door.listen(64)
        command = [sys.executable, __file__, str(door.fileno()), *imported]
        subprocess.Popen(command, pass_fds=[door.fileno()], env=os.environ | settings)
        return _connect(name)


def _serve(door: socket.socket) -> None:
    """Fork a watcher for every request; the watcher forks the process and tells its number and its exit status."""
    lines: list[socket.socket] = []
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # watchers that have ended
                pass
        for ready in select.select([door, *lines], [], [])[0]:
            if ready is door:
                lines.append(door.accept()[0])
                continue
            request, fds, _, _ = socket.recv_fds(ready, 1 << 20, 3)
            if not request:
                lines.remove(ready)
                ready.close()
            elif not os.fork():
                for line in (door, *lines):
                    line.close()
                return _watch(request, fds)
            for fd in fds:
                os.close(fd)
        if not lines and not select.select([door], [], [], 0)[0]:
            return None


def _watch(request: bytes, fds: list[int]) -> None:
    """In a fork of the server."""
    out, err, reply = fds
    if pid := os.fork():
        os.write(reply, f"{pid}\n".encode())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(reply, f"{status}\n".encode())
        os._exit(0)
    os.close(reply)
    os.dup2(out, 1)
    os.dup2(err, 2)
    _run(**json.loads(request))


def _run(program: str, arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the environment says where
    script = "\n" not in program
    sys.argv = [program if script else "-c", *arguments]
    try:
        if script:
            runpy.run_path(program, run_name="__main__")
        else:
            exec(compile(program, "<code>", "exec"), {"__name__": "__main__"})
        status: object = 0
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            raise
    _end(status)


def _end(status: int) -> None:
    """End as an interpreter does, but take nothing apart: with all of torch that lasts a second or more."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads of the program
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        __import__(name)
    gc.collect()
    gc.freeze()  # a fork that collects garbage would look at all of it, and copy the pages
    _serve(socket.socket(fileno=int(sys.argv[1])))
