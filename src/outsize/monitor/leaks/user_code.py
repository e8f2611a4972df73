"""Which files, modules and frames are the user's own, and which belong to Python, its packages, or to Outsize."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from types import CodeType, FrameType, ModuleType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for path in {*sysconfig.get_paths().values(), os.path.dirname(os.__file__)}
    if path and path not in (sys.prefix, sys.base_prefix)
)


@functools.lru_cache(maxsize=4096)
def is_user_file(name: str) -> bool:
    """True for a file of the program itself."""
    if name.startswith("<"):
        # libraries make code from strings too: only where there is no file, a string is the program itself
        typed = getattr(sys.modules.get("__main__"), "__file__", None) is None
        return (typed and name in ("<stdin>", "<string>")) or name.startswith("<ipython")
    path = os.path.realpath(name)
    if os.path.basename(path).startswith("__autograph_generated_file"):  # TensorFlow's own version of a function
        return False
    packages = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
    return not path.startswith((_PACKAGE, *_LIBRARIES)) and not any(part in path for part in packages)


def is_user_module(module: ModuleType) -> bool:
    """True for a module of the program itself."""
    file = vars(module).get("__file__")  # some modules run code when they are asked for what they lack
    return module.__name__ == "__main__" if not isinstance(file, str) else is_user_file(file)


def user_modules() -> list[ModuleType]:
    """The program's own modules, the main one first."""
    modules = [
        module for module in list(sys.modules.values()) if isinstance(module, ModuleType) and is_user_module(module)
    ]
    return sorted(modules, key=lambda module: module.__name__ != "__main__")


def user_frames() -> list[FrameType]:
    """Frames of the program's own code in all threads, innermost first; ours are left out."""
    found = []
    for frame in sys._current_frames().values():
        here: FrameType | None = frame
        while here is not None:
            if is_user_file(here.f_code.co_filename):
                found.append(here)
            here = here.f_back
    return found


def locals_of(frame: FrameType) -> dict[str, object]:
    """The frame's variables. Python keeps its own copy of them with the frame until it ends, which would keep tensors
    alive: that copy is emptied again."""
    names = frame.f_locals
    if (
        names is frame.f_globals or not frame.f_code.co_flags & 1
    ):  # a module's or a class's body: these are the variables themselves
        return dict(names)
    copy = dict(names)
    if sys.version_info < (3, 13) and sys.gettrace() is None:
        names.clear()
    return copy


def line_of(frame: FrameType | None) -> str | None:
    """The innermost user's line at or above a frame, as `train.py:41`."""
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return spell(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def code_line(code: CodeType) -> str:
    """Where a function begins."""
    return spell(code.co_filename, code.co_firstlineno)


def spell(file: str, line: int) -> str:
    """`train.py:41`; relative to the current folder where the file is below it, else with the file's whole path."""
    folder = os.getcwd() + os.sep
    path = os.path.abspath(file) if not file.startswith("<") else file
    return f"{path.removeprefix(folder)}:{line}"
