"""What a package says of itself is true and the same everywhere: version, Pythons, extras, what the sdist holds."""

import io
import pathlib
import re
import tomllib
import zipfile

import outsize
from outsize.core.extras import EXTRAS

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_the_same_everywhere():
    recipe = (ROOT / ".ci" / "recipe" / "meta.yaml").read_text()
    assert PROJECT["version"] == outsize.__version__ == re.search(r'version = "([^"]+)"', recipe).group(1)


def test_the_recipe_needs_what_the_package_needs():
    recipe = (ROOT / ".ci" / "recipe" / "meta.yaml").read_text()
    for needed in PROJECT["dependencies"]:
        assert f"- {needed.replace('>=', ' >=')}" in recipe


def test_every_extra_that_a_sentence_names_exists_and_installs_that_package():
    extras = PROJECT["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert extra in extras
        if package != "keras":  # comes with TensorFlow
            assert any(line.partition("[")[0].startswith(package) for line in extras[extra]), (package, extra)


def test_the_sdist_takes_along_what_its_tests_read():
    listed = (ROOT / "MANIFEST.in").read_text()
    for folder in ("tests", "docs", "examples", "scripts", "benchmarks", ".ci"):
        assert f"graft {folder}\n" in listed


def test_the_oldest_python_is_the_first_that_is_named():
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert named[0] == PROJECT["requires-python"].removeprefix(">=")


def test_the_wheel_stays_below_two_megabytes():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path in sorted((ROOT / "src" / "outsize").rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                wheel.write(path, path.relative_to(ROOT / "src"))
    assert packed.tell() < 2_000_000 - 50_000, "the wheel has metadata besides"
