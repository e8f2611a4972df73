"""Loaded by Python at the start of a program under `outsize run`, before its first line. Standard library only.

Does two things and nothing while the program runs (three where it is to cooperate: then it starts `outsize.watch()`). An
uncaught exception, those that led to it, and the memory this process had then are written to a file for the parent.
SIGURG, which means nothing to programs that do not ask for it, makes Python write the current stack to another file, so
that the parent learns which line is growing. A long call of C code never lets Python do that: SIGWINCH makes
`faulthandler` write it, in C. The parent sends that one only to a process that is inside such a call: a stack that is
read while Python changes it can end the program (seen 8 times in 158,000 signals). A `sitecustomize` of the user's own is
loaded as if this one were not there.
"""

import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types

_HERE = os.path.dirname(os.path.abspath(__file__))
FRAMES = 40
"""Most calls that are noted of an error, the last ones."""


def _load_the_users_own() -> None:
    path = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _write_stacks(folder: str) -> None:
    import faulthandler
    import signal

    file = open(os.path.join(folder, f"stack.{os.getpid()}"), "wb", buffering=0)  # noqa: SIM115 (open as long as the program)

    def write(_number, frame):  # type: ignore[no-untyped-def]
        lines: list[str] = []
        while frame is not None and len(lines) < 100:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n')
            frame = frame.f_back
        try:
            os.write(file.fileno(), "".join(lines).encode("utf-8", "replace"))
        except OSError:  # the folder's disk is full: the program goes on
            return

    signal.signal(signal.SIGURG, write)
    signal.siginterrupt(signal.SIGURG, False)
    faulthandler.register(signal.SIGWINCH, file=file, all_threads=False, chain=False)


def _memory() -> "list[str]":
    """`name bytes` lines: what this process has, and the limits on it."""
    import resource

    lines = []
    for name in ("AS", "DATA"):
        soft = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
        lines += [f"{name} {soft}"] if soft != resource.RLIM_INFINITY else []
    with open("/proc/self/status") as status:
        for words in map(str.split, status):
            if words and words[0] in ("VmPeak:", "VmSize:", "VmData:", "RssAnon:"):
                lines.append(f"{words[0][:-1]} {int(words[1]) * 1024}")
    return lines


def _chain(error: "BaseException | None") -> "list[str]":
    """The exception and those that led to it, the last first."""
    lines: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        kind = type(error)
        lines.append(f"{kind.__module__}.{kind.__qualname__}: {error}".removeprefix("builtins."))
        error = error.__cause__ or error.__context__
    return lines


def _frames(trace: "types.TracebackType | None") -> "list[str]":
    """Where the error came from, the last call last: whose function it was says as much as the words."""
    lines = []
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.append(f'File "{code.co_filename}", line {trace.tb_lineno}, in {code.co_name}')
        trace = trace.tb_next
    return lines[-FRAMES:]


def _note(folder: str, error: "BaseException | None", trace: "types.TracebackType | None") -> None:
    try:
        text = "\n".join([*_memory(), "", *_chain(error), *_frames(trace)])
        handle = os.open(os.path.join(folder, f"error.{os.getpid()}"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        os.write(handle, text.encode("utf-8", "replace"))
        os.close(handle)
    except Exception as own:  # nothing of ours may hide the error that ends the program
        sys.stderr.write(f"outsize: could not note this error: {own!r}\n")


def _write_the_last_error(folder: str) -> None:
    before = sys.excepthook

    def hook(kind, error, trace):  # type: ignore[no-untyped-def]
        _note(folder, error, trace)
        before(kind, error, trace)

    sys.excepthook = hook


def _watch_from_inside() -> None:
    """Start `outsize.watch()` in this process, where it is to cooperate and Outsize is installed for its Python."""
    try:
        from outsize.monitor.watching import watch
    except ImportError:
        sys.stderr.write("outsize: this Python has no outsize: the program is watched from outside only\n")
        return
    import atexit

    own = watch().__enter__()
    atexit.register(own.__exit__, None, None, None)


_folder = os.environ.get("OUTSIZE_RUN_FOLDER")
if _folder and os.path.isdir(_folder):
    try:
        _write_stacks(_folder)
        _write_the_last_error(_folder)
        if os.environ.pop("OUTSIZE_WATCH", None):  # its children are watched from outside
            _watch_from_inside()
    except Exception as _error:
        sys.stderr.write(f"outsize: not watching inside this process: {_error!r}\n")
_load_the_users_own()
