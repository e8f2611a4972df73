"""What newcomers type, and the answer that each gets: one sentence, status 2, and the next move."""

import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import outsize
from outsize.cli import VERBS, build_parser, main
from outsize.cli.examples import EXAMPLES
from outsize.core.units import parse_bytes


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.random.default_rng(0).random((200, 6), dtype="float32"))
    np.savez("several.npz", a=np.ones((3, 4)), b=np.ones(5, "int8"))
    for name, head in {
        "a.csv": b"a,b\n1,2\n",
        "a.png": b"\x89PNG\r\n\x1a\n" + bytes(50),
        "a.jpg": b"\xff\xd8\xff\xe0" + bytes(50),
        "a.mat": b"MATLAB 5.0 MAT-file" + b" " * 120,
        "a.unknown": b"12345678" * 9,
    }.items():
        (tmp_path / name).write_bytes(head)
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([1, 2]))
    (tmp_path / "empty_folder").mkdir()
    return tmp_path


MISTAKES = {
    "szie 3,4": "did you mean size?",
    "mem": "did you mean memory?",
    "ls x.npy": "did you mean show?",
    "frobnicate": "outsize --help",
    "size 10 --budget 16": "write 16MiB or 16GiB",
    "size 10 --budget 0.5": "has no unit",
    "size 10 --dtype flaot32": "did you mean float32",
    "size 10 --card v100": "V100 16GB or V100 32GB",
    "size 10 --card foo": "known are",
    "size several.npz": "outsize show several.npz",
    "size missing.npy": "there is no file missing.npy",
    "show missing.npy": "no such file",
    "show a.csv": "write Parquet",
    "show a.png": "PNG picture",
    "show a.pkl": "np.save",
    "show empty_folder": "without zarr metadata",
    "show a.unknown": "shape=",
    "compute x+1 --in x=a.csv": "write Parquet",
    "compute x+1 --in x=a.jpg": "JPEG picture",
    "compute x+1 --in x=a.mat": "-v7.3",
    "compute x+1 --in x=missing.npy": "no such file",
    "compute x.astype('flaot16') --in x=x.npy": "did you mean float16",
    "compute x.astype('bfloat16') --in x=x.npy": "only .safetensors can hold it",
    "compute x+1 --in x=gs://bucket/x.npy": "pip install 'outsize[gcs]'",
    "convert missing.npy y.npy": "no such file",
    "explain missing.log": "no such file",
    "estimate missing.py": "there is no script",
    "completion tcsh": "invalid choice",
}
"""What is typed -> words of the answer."""


@pytest.mark.parametrize("line", MISTAKES)
def test_a_newcomers_mistake_is_answered_in_one_sentence_with_status_2(line, files, capsys):
    if "gs://" in line:
        pytest.importorskip("fsspec")
    assert main(shlex.split(line, posix="'" not in line)) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and error.startswith("outsize: ")
    assert MISTAKES[line] in error


@pytest.mark.parametrize("card", ["3090", "h100", "a6000", "4090", "t4", "RTX 4090"])
def test_a_card_is_known_by_the_name_people_use(card, capsys):
    assert main(["size", "10", "--card", card]) == 0


def test_a_letter_means_a_power_of_1024():
    assert parse_bytes("16G") == parse_bytes("16GiB") == 16 * 2**30
    assert parse_bytes("1.5m") == 3 * 2**19


def test_a_message_in_quotes_is_explained(capsys):
    assert main(["explain", "CUDA out of memory. Tried to allocate 20.00 MiB"]) == 0
    assert "cause:" in capsys.readouterr().out


def test_size_and_show_say_what_a_file_holds(files, capsys):
    assert main(["size", "x.npy"]) == 0
    assert "float32[200, 6]: 4,800 bytes" in capsys.readouterr().out
    assert main(["show", "x.npy", "several.npz"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"float32 +200 x 6 +4\.69 KiB", text) and re.search(r"b +int8 +5 +5 B", text)
    contents = outsize.show("several.npz")
    assert [array.key for array in contents.arrays] == ["a", "b"] and contents.fits
    pytest.importorskip("zarr")
    outsize.open("x.npy").save("x.zarr", chunks=(50, 6))
    assert outsize.show("x.zarr").arrays[0].chunks == (50, 6)


def test_the_line_that_show_suggests_works(files, capsys):
    main(["show", "several.npz"])
    line = re.search(r"next: (outsize .*?)   ", capsys.readouterr().out).group(1)
    assert main(shlex.split(line)[1:]) == 0


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_examples_that_its_parser_takes(verb, capsys):
    assert EXAMPLES[verb]
    for line in EXAMPLES[verb]:
        words = shlex.split(re.sub(r'^.*\| |^eval "\$\(|\)"$|>.*$', "", line))
        assert words[:2] == ["outsize", verb]
        build_parser(verb).parse_args(words[1:])
        assert line in build_parser(verb)._subparsers._group_actions[0].choices[verb].format_help()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_takes_the_completion_and_it_names_every_verb(shell, capsys, tmp_path):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for verb in VERBS:
        assert verb in text
    assert "budget" in text and "rtx4090" in text
    script = tmp_path / "completion"
    script.write_text(text)
    if any(os.access(f"{folder}/{shell}", os.X_OK) for folder in ("/bin", "/usr/bin")):
        subprocess.run([shell, "-n", str(script)], check=True)


def test_bash_completes_verbs_options_cards_and_files(files, capsys):
    main(["completion", "bash"])
    script = files / "completion"
    script.write_text(capsys.readouterr().out)

    def complete(*words):
        line = " ".join(f"'{word}'" for word in words)
        code = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _outsize; echo ${{COMPREPLY[@]}}"
        return subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=files).stdout.split()

    assert complete("outsize", "si") == ["size"]
    assert complete("outsize", "size", "--bu") == ["--budget"]
    assert complete("outsize", "size", "--card", "rtx409") == ["rtx4090"]
    assert complete("outsize", "show", "x.n") == ["x.npy"]


OLD = {"install": "explain_uncaught", "keep": "learn_from_run", "loader": "data_loader"}


@pytest.mark.parametrize(("old", "new"), OLD.items())
def test_an_old_name_works_and_warns(old, new):
    with pytest.warns(DeprecationWarning, match=f"outsize.{old} is called outsize.{new} now"):
        assert getattr(outsize, old) is getattr(outsize, new)


BLOCKED = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "zarr", "h5py", "tensorly", "zfpy", "fsspec", "pyarrow", "tifffile"}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
import numpy as np, outsize
np.save("x.npy", np.ones((30, 40), "float32"))
x = outsize.open("x.npy")
tries = {
    "torch": [
        lambda: outsize.fit(1, 2, 3, 4, budget="1GiB"), lambda: outsize.estimate(lambda: 1), lambda: outsize.data_loader([1], 1),
        lambda: outsize.calibrate(), lambda: outsize.batch_size(1, 2, 3, 4), lambda: x.tiles(device="cpu"),
        lambda: x.compute(device="cuda"), lambda: outsize.DataSource("x.npy").to_torch(2),
    ],
    "zarr": [lambda: x.save("x.zarr")], "hdf5": [lambda: x.save("x.h5")],
    "tensorly": [lambda: outsize.decompose("x.npy", "cp")], "zfp": [lambda: outsize.decompose("x.npy", "zfp")],
    "remote": [lambda: outsize.open("s3://bucket/x.npy")],
}
for extra, calls in tries.items():
    for number, call in enumerate(calls):
        try:
            call()
        except outsize.InputError as error:
            assert isinstance(error, ImportError) and f"pip install 'outsize[{extra}]'" in str(error), (extra, number, error)
        else:
            raise AssertionError((extra, number))
tile = next(iter(x.tiles(shape=(10, 40))))
assert type(tile) is np.ndarray and tile.shape == (10, 40)
print("all answered")
"""


def test_a_missing_extra_is_one_sentence_with_the_pip_line_everywhere(tmp_path):
    answer = subprocess.run([sys.executable, "-c", BLOCKED], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert answer.stdout == "all answered\n", answer.stderr


def listen_to_ctrl_c():
    """A process that was started with SIGINT ignored passes that on to its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_says_that_the_same_call_goes_on_and_it_does(tmp_path):
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", "float32", (60_000, 2_000)).flush()
    words = [sys.executable, "-m", "outsize", "compute", "sin(cos(sin(x)))", "--in", "x=x.npy", "--out", "z.npy"]
    words += ["--budget", "8MiB"]
    program = subprocess.Popen(
        words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=listen_to_ctrl_c
    )  # fmt: skip
    while program.poll() is None and not any("journal" in name for name in os.listdir(tmp_path)):
        time.sleep(0.02)
    time.sleep(0.2)
    program.send_signal(signal.SIGINT)
    error = program.communicate(timeout=900)[1]
    assert program.returncode == 130
    assert "the same call goes on from there" in error and "z.npy" in error
    assert subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=900).returncode == 0
    wanted = np.sin(np.cos(np.sin(np.float32(0))))
    assert np.load(tmp_path / "z.npy", mmap_mode="r")[-1, -1] == pytest.approx(wanted)
