"""Scripts of many styles are followed as they are: steps, phases and prints are theirs, and nothing of them stays behind."""

import json
import os
import pathlib
import subprocess
from functools import cached_property
from types import SimpleNamespace

import forks
import pytest
from effort import long

torch = pytest.importorskip("torch")

import outsize  # noqa: E402
from outsize.cli import main  # noqa: E402
from outsize.core.errors import InputError  # noqa: E402
from outsize.model.scripts import start  # noqa: E402
from outsize.model.scripts.start import estimate_script  # noqa: E402

STYLES = pathlib.Path(__file__).parent / "styles"
NEEDS = {"hugging": "transformers", "accelerated": "accelerate"}
MAY_NOT_FIT = {"adversaries", "agent", "closure"}
"""Scripts whose size hangs on a guess: an optimizer that steps now and then, an action that is read, the directions that L-BFGS
keeps if its comparisons come out so."""
TIMED = {"scaled"}
"""A script whose thread fetches batches ahead: how many wait in each step, and so whether its steps are alike, is chance."""

REAL_PEAK = """
import runpy, sys
import torch
from outsize.model.torch_port.objects import start_allocator_events, stop_allocator_events

torch.set_num_threads(1)
script, sys.argv = sys.argv[1], sys.argv[1:]
assert start_allocator_events()  # torch.profiler counts the same, and takes seconds to start
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit:
    pass
held = peak = 0
for change in stop_allocator_events():
    held += change
    peak = max(peak, held)
print(peak)
"""
"""Runs a script for real; prints the most bytes that torch's allocator for the CPU had given out."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("train", "val"):
        (tmp_path / f"{name}.bin").write_bytes(bytes(number % 3 * (number % 2) for number in range(4000)))
    return tmp_path


FOLLOW = """
import runpy, sys
from outsize.model.estimation import host_memory
sys.path[0] = ""
host_memory._measure_base = lambda names: 2**28  # takes another process; what these tests ask for is above it
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


class Forked:
    """The process that follows a script as a fork: only the time of its imports is missing."""

    def __init__(self, command, *, env, **_):
        *_, module, request = command
        self._child = forks.start(FOLLOW, module, request, imported=forks.TORCH, environment=env)
        self.kill = self._child.kill

    @cached_property
    def stdout(self):
        out, err = self._child.communicate()
        return (out + err).splitlines()

    def wait(self):
        return self._child.returncode


@pytest.fixture
def forked(monkeypatch):
    """The long run starts real processes; the normal one does where a test does not ask for this."""
    if not long():
        monkeypatch.setattr(start, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Forked}))


def write(folder, source):
    (folder / "train.py").write_text(source)
    return "train.py"


@pytest.mark.parametrize("style", sorted(path.stem for path in STYLES.glob("*.py") if path.stem != "settings"))
def test_a_script_is_followed_on_a_card_that_is_not_there(style, folder, forked):
    pytest.importorskip(NEEDS.get(style, "torch"))
    before = sorted(os.listdir(folder))
    found = estimate_script(str(STYLES / f"{style}.py"), card="a100-80")
    assert sorted(os.listdir(folder)) == before
    names = [phase.name for phase in found.phases]
    assert names[:3] == ["build", "first step", "steady step"]
    assert ("evaluation" in names) == (style in ("tokens", "pictures", "agent"))
    assert found.steps >= 3
    assert 0 < found.phases[0].allocated < found.phases[2].allocated <= found.peak_allocated.bytes
    assert max(phase.reserved for phase in found.phases) == found.peak_reserved.bytes
    assert style in TIMED or bool(found.guesses) == (style in MAY_NOT_FIT)
    assert found.fits is (None if found.guesses else True)


@pytest.mark.parametrize(
    ("style", "words"),
    [
        ("tokens", ["--steps=3"]),
        ("pictures", ["--epochs=1"]),
        ("adversaries", ["3"]),
        ("closure", ["3"]),
        ("by_hand", ["3"]),
    ],
)
def test_a_real_run_on_the_cpu_stays_below_the_bound(style, words, folder, forked):
    script = str(STYLES / f"{style}.py")
    found = estimate_script(script, device="cpu")
    run = forks.start(REAL_PEAK, script, *words, imported=forks.TORCH)
    out, err = run.communicate()
    assert run.returncode == 0, err
    peak = int(out.split()[-1])
    assert peak <= found.peak_allocated.bound
    assert found.peak_allocated.bytes <= 1.15 * peak


PLAIN = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 8)).cuda()
    return model, torch.optim.AdamW(model.parameters()), torch.rand(64, 256, device="cuda")

def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()

if __name__ == "__main__":
    made = build()
    while True:
        step(*made)
"""


def test_a_script_takes_what_its_step_takes(folder, forked):
    script = write(folder, PLAIN)
    names = {"__name__": "train"}
    exec(PLAIN, names)
    theirs = outsize.estimate(names["step"], build=names["build"])
    ours = estimate_script(script)
    assert ours.peak_allocated == theirs.peak_allocated
    assert ours.peak_reserved == theirs.peak_reserved


LOOP = """
import torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    loss = model(torch.rand(8, 64, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (LOOP + "while True:\n    open('data.bin', 'rb')\n    step()", "train.py:12 reads data.bin, which is not there"),
        (LOOP + "import urllib.request as r\nr.urlopen('http://data.example')", "train.py:12 wants the network (data.example)"),
        (LOOP + "import no_such_module_here", "train.py:11 needs the module 'no_such_module_here'"),
        (LOOP + "import os\nos.environ['LOCAL_RANK']", "train.py:12 wants LOCAL_RANK, which torchrun sets"),
        (LOOP + "import sys\nsys.exit(4)", "ended at train.py:12 with status 4, before a call of optimizer.step()"),
        (LOOP + "model(torch.rand(8, 64, device='cuda'))", "the last line that used a tensor is train.py:11"),
        (LOOP + "step()\nstep().wrong", "train.py:12 (step().wrong) raised AttributeError"),
        (LOOP.replace(".cuda()", "").replace(', device="cuda"', "") + "while True: step()", "puts nothing on a card"),
        (LOOP + "import time\ntime.sleep(100)", "train.py is at train.py:12 after 0 steps: it took longer than 5 seconds"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_one_sentence_with_the_line(source, said, folder, forked):
    seconds = 5 if "sleep" in source else 100
    with pytest.raises(InputError) as error:
        estimate_script(write(folder, source), card="a100-80", seconds=seconds)
    assert said in str(error.value)


USING = """
import torch
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(800, 256)).eval()
with torch.no_grad():
    kept = torch.cat([model(torch.rand(64, 3, 12, 12)) for _ in range(20)])
"""


def test_a_script_that_only_uses_its_model_is_followed_to_its_end(folder, forked):
    found = estimate_script(write(folder, USING), device="cpu")
    assert [phase.name for phase in found.phases] == ["build", "evaluation"]
    kept = 2 * 20 * 64 * 256 * 4  # the parts and what joins them
    assert kept < found.peak_allocated.bytes < 1.5 * kept
    assert not found.guesses


def test_what_lbfgs_may_keep_is_said_in_bytes(folder, forked):
    found = estimate_script(str(STYLES / "closure.py"), device="cpu")
    assert any(guess.startswith("L-BFGS keeps up to 5 pairs of directions") for guess in found.guesses)


def test_an_endless_use_of_a_model_is_stopped_and_may_not_fit(folder, forked):
    found = estimate_script(
        write(folder, USING + "import time\ntime.sleep(100)"), device="cpu", seconds=5, budget="8GiB"
    )
    assert any("stopped after 5 seconds" in guess for guess in found.guesses) and found.fits is None


COMPILED = """
import torch
model = torch.compile(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)))
if torch.cuda.is_available():
    model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
device = next(model.parameters()).device
while True:
    model(torch.rand(512, 64, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_compiled_model_is_followed_where_the_compiler_works_and_else_as_it_was_written(device, folder, forked):
    found = estimate_script(write(folder, COMPILED), device=device)
    assert found.steps == 3 and any(("uncompiled" if device == "cpu" else "Inductor") in note for note in found.notes)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("torch.sparse_coo_tensor(torch.zeros(2, 3, dtype=torch.long), torch.ones(3), (4, 4))", "sparse"),
        ("torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(8, 8)), dtype=torch.qint8)", "quantised"),
    ],
)  # fmt: skip
def test_tensors_of_other_kinds_are_refused_by_their_names(line, kind, folder, forked):
    with pytest.raises(InputError, match=f"{kind} tensors are not followed .* measures a real run"):
        estimate_script(write(folder, LOOP + line), device="cpu")


def test_steps_that_keep_their_graph_grow_and_may_not_fit(folder, forked):
    again = "kept = []\nwhile True:\n    step()\n    kept.append(model(torch.rand(800, 64, device='cuda')))"
    script = write(folder, LOOP + again)
    found = estimate_script(script, budget="8GiB")
    assert any("each step leaves" in guess and "train.py:14" in guess for guess in found.guesses)
    assert found.fits is None


def test_an_evaluation_that_keeps_every_batch_is_a_guess(folder, forked):
    source = (
        LOOP
        + """
from torch.utils.data import DataLoader
loader = DataLoader(torch.rand(1000, 64), batch_size=10)
while True:
    for x in loader:
        step()
    with torch.no_grad():
        every = [model.eval()(x.cuda()) for x in loader]
    model.train()
"""
    )
    found = estimate_script(write(folder, source))
    assert any("evaluation keeps 2.50 KiB more with each batch" in guess for guess in found.guesses)


def test_other_processes_and_the_network_are_refused_and_said(folder, forked):
    source = (
        LOOP
        + """
import multiprocessing, subprocess, urllib.request
try:
    subprocess.run(["git", "log"])
except FileNotFoundError:
    print("no git")
try:
    urllib.request.urlopen("http://log.example")
except OSError:
    print("no network")
with multiprocessing.Pool(4) as pool:
    print(pool.map(abs, [-1, -2]))
while True: step()
"""
    )
    found = estimate_script(write(folder, source))
    assert found.printed == ("no git", "no network", "[1, 2]")
    assert any("git: it was not started" in note for note in found.notes)
    assert any("log.example" in note for note in found.notes)
    assert not found.guesses


FILES = """
import json, os, pathlib, shutil, tempfile
os.remove("old.txt")
assert not os.path.exists("old.txt") and "old.txt" not in os.listdir()
pathlib.Path("runs/a/b").mkdir(parents=True)
with open("runs/a/b/log.txt", "w") as f: f.write("one")
with open("runs/a/b/log.txt", "a") as f: f.write(" two")
os.replace("runs/a/b/log.txt", "runs/a/b/new.txt")
assert pathlib.Path("runs/a/b/new.txt").read_text() == "one two" and os.listdir("runs/a/b") == ["new.txt"]
with open("kept.txt", "a") as f: f.write(" more")
assert open("kept.txt").read() == "real more"
shutil.rmtree("tree")
assert not os.path.isdir("tree")
shutil.copy("kept.txt", "copy.txt")
shutil.rmtree("runs")
assert not os.path.exists("runs")
with tempfile.TemporaryDirectory() as place: open(os.path.join(place, "x"), "w").close()
try:
    open("nowhere/x", "w")
except FileNotFoundError as error:
    assert error.filename.endswith("nowhere/x")
try:
    os.mkdir("stays")
except FileExistsError:
    print("all well")
"""


def test_files_are_as_the_script_left_them_and_the_disk_is_as_it_was(folder):
    (folder / "old.txt").write_text("old")
    (folder / "kept.txt").write_text("real")
    (folder / "stays").mkdir()
    (folder / "tree" / "leaf").mkdir(parents=True)
    (folder / "tree" / "leaf" / "x").write_text("x")
    script = write(folder, FILES + LOOP + "while True: step()")
    before = {path: path.read_text() for path in folder.rglob("*") if path.is_file()}
    found = estimate_script(script)
    assert found.printed == ("all well",)
    assert {path: path.read_text() for path in folder.rglob("*") if path.is_file()} == before
    assert (folder / "stays").is_dir()


def test_the_command_shows_phases_and_keeps_the_scripts_prints_apart(folder, capsys, forked):
    script = write(folder, LOOP + "import sys\nfor _ in range(9):\n    step()\n    print('mine', sys.argv[1:])")
    assert main(["estimate", "--card", "rtx4090", script, "--card", "none"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("train.py: fits") and "steady step" in shown.out and "mine" not in shown.out
    assert "│ mine ['--card', 'none']" in shown.err
    assert main(["estimate", "--json", "--budget", "1MiB", script]) == 1
    shown = capsys.readouterr()
    data = json.loads(shown.out)
    assert [phase["name"] for phase in data["phases"]] == ["build", "first step", "steady step"]
    assert data["printed"][0] == "mine []" and not shown.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["estimate", "nowhere.py"], "there is no script nowhere.py here"),
        (["estimate", "--batch", "8", "train.py"], "--batch is not for scripts"),
        (["estimate", "--card", "rtx9999", "train.py"], "unknown card 'rtx9999'"),
        (
            ["estimate", "train:step"],
            "train.py starts to train when it is imported (line 11): outsize estimate train.py",
        ),
        (["estimate", "train:step", "more"], "'more' is one argument too many"),
    ],
)
def test_mistakes_are_named(words, said, folder, capsys):
    write(folder, LOOP + "for _ in range(9):\n    optimizer.step()")
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_processes_that_do_the_same_work_are_followed_once(folder, forked):
    source = """
import torch
import torch.multiprocessing as mp

def work(rank, model, answers):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.rand(64, 256)).square().mean().backward()
        optimizer.step()
    answers.put(model.weight.detach())

if __name__ == "__main__":
    mp.set_start_method("spawn", force=True)
    model = torch.nn.Linear(256, 256)
    model.share_memory()
    answers = mp.get_context("spawn").Queue()
    workers = [mp.Process(target=work, args=(rank, model, answers)) for rank in range(4)]
    for worker in workers:
        worker.start()
    answers.get()
    for worker in workers:
        worker.join()
    assert not any(worker.is_alive() or worker.exitcode for worker in workers)
"""
    found = estimate_script(write(folder, source), device="cpu")
    weights = 4 * (256 * 256 + 256)
    assert found.steps == 3 and 3 * weights < found.peak_requested.bytes < 4 * weights + 2**18
    assert any("one is followed" in note for note in found.notes)


def test_what_another_process_raises_is_said_with_its_line(folder):
    source = """
import multiprocessing

def work():
    raise ValueError("no such thing")

if __name__ == "__main__":
    worker = multiprocessing.Process(target=work)
    worker.start()
    worker.join()
"""
    with pytest.raises(InputError, match=r"train\.py:5.*ValueError: no such thing"):
        estimate_script(write(folder, source), device="cpu")
