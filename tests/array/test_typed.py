"""What a type checker sees of the namespace: every public name has a type, every function a signature."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import outsize.array as xp

ROOT = Path(__file__).parents[2]
EXPRESSIONS = (
    *(f"xp.{name}" for name in xp.__all__ if name not in ("fft", "linalg", "random")),
    *(f"xp.fft.{name}" for name in xp.fft.__all__),
    *(f"xp.linalg.{name}" for name in xp.linalg.__all__),
    "xp.random.default_rng", "xp.random.default_rng(7).normal", "xp.random.default_rng(7).normal(size=3)",
    "outsize.open('x.npy')", "x + 1", "1 - x", "x @ x", "x < 2", "-x", "x[0]", "x.T", "x.sum(axis=0)", "x.plan()",
    "x.mean", "x.astype", "x.save('y.npy')", "x.shape", "xp.sqrt(x)", "xp.std(x, axis=0)", "xp.fft.fft(x)",
    "outsize.array.fft.fft(x)", "xp.linalg.svd(x).U",
)  # fmt: skip
ARRAY = "outsize.array.api.lazy.Array"


def revealed(tmp_path: Path) -> dict[str, str]:
    """What mypy says of each expression, with the project's own settings: the check of its types has filled their cache."""
    file = tmp_path / "names.py"
    lines = ["import outsize", "import outsize.array as xp", "import outsize.array.fft", "x: xp.Array"]
    file.write_text("\n".join([*lines, *(f"reveal_type({text})" for text in EXPRESSIONS)]))
    done = subprocess.run([sys.executable, "-m", "mypy", str(file)], capture_output=True, text=True, cwd=ROOT)
    assert "Revealed type" in done.stdout, done.stdout + done.stderr
    found = re.findall(r'names.py:(\d+): note: Revealed type is "(.*)"', done.stdout)
    return {EXPRESSIONS[int(line) - len(lines) - 1]: text for line, text in found}


def test_every_public_name_has_a_type(tmp_path: Path) -> None:
    types = revealed(tmp_path)
    assert set(types) == set(EXPRESSIONS)
    assert not {name: text for name, text in types.items() if re.search(r"^Any$|^def \(\*Any, \*\*Any\)|-> Any$", text)}
    assert re.fullmatch(rf"def \(.*keepdims: (builtins\.)?bool =\) -> {ARRAY}", types["xp.sum"])
    assert re.fullmatch(rf"def \(Any, Any\) -> {ARRAY}", types["xp.add"])
    for text in ("x + 1", "1 - x", "x @ x", "x < 2", "-x", "x[0]", "xp.sqrt(x)", "outsize.array.fft.fft(x)"):
        assert types[text] == ARRAY, text


def test_the_namespace_shows_no_module_but_its_own_parts() -> None:
    shown = {name for name in dir(xp) if type(getattr(xp, name)).__name__ == "module"}
    assert shown == {"fft", "linalg", "random"}
