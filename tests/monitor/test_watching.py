"""`outsize.watch()`: what it reads, how steps and phases are known, and that it never harms its program."""

import gc
import os
import subprocess
import sys
import threading
import time
import types
import warnings
from typing import ClassVar

import numpy as np
import pytest

import outsize
from outsize.core.errors import InputError
from outsize.core.outcomes.recording import Finding, GpuSample, HostSample, Mark, Sample
from outsize.core.outcomes.watch_stream import newest
from outsize.monitor import publication
from outsize.monitor.allocators import device_meters, read_allocators, read_malloc, read_small
from outsize.monitor.history import History
from outsize.monitor.leaks import inspection
from outsize.monitor.leaks.census import GRAPH_NODES, Census, find_largest_graph
from outsize.monitor.leaks.device_history import DeviceHistory
from outsize.monitor.leaks.inspection import Inspection
from outsize.monitor.leaks.names import find_holding
from outsize.monitor.leaks.retained import buffer_bytes, measure_each
from outsize.monitor.leaks.tracer import LineTracer
from outsize.monitor.main_thread import run_in_main_thread
from outsize.monitor.recorder import load
from outsize.monitor.trend import Trend


def wait(until, seconds=60):
    """Until it is so: a busy machine takes longer, and nothing is proved by how long."""
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_for_samples(w, count=2):
    have = len(w.readings)
    wait(lambda: len(w.readings) >= have + count)


def test_samples_come_about_ten_times_a_second_and_the_peak_is_among_them():
    begin = time.monotonic()
    with outsize.watch() as w:
        block = np.ones(12 * 2**20)
        wait_for_samples(w, 4)
        del block
        wait_for_samples(w)
    assert 6 <= len(w.readings) <= 10 * (time.monotonic() - begin) + 4
    assert w.peak.host.anonymous >= w.readings[-1].host.anonymous + 80 * 2**20
    assert w.peak.process_count >= 1 and w.peak.host.limit > 0
    assert w.leaks() == ()


def test_requested_bytes_follow_what_the_program_asks_for_and_not_what_the_allocator_keeps():
    before = read_malloc() + read_small()
    blocks = [bytearray(50_000) for _ in range(400)]
    held = read_malloc() + read_small()
    del blocks
    assert 19 * 2**20 <= held - before <= 24 * 2**20
    assert abs((read_malloc() + read_small()) - before) < 2**20


def test_steps_are_heard_of_from_the_first_optimizer_and_marked_steps_come_first():
    import torch

    one, two = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    with outsize.watch() as w:
        wait_for_samples(w)
        for _ in range(5):
            one.step()
            two.step()
        assert w._steps == 5
        w.step()
        one.step()
        assert w._steps == 1
    one.step()
    assert w._steps == 1


def test_steps_go_on_where_the_first_optimizer_is_used_no_more_and_others_in_turn_count_once():
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(3))
    first, second = (torch.optim.SGD([weight], lr=0.1) for _ in range(2))
    with outsize.watch() as w:
        wait(lambda: w._hook is not None)
        for _ in range(10):
            first.step()
            for _ in range(5):
                second.step()
        assert w._steps == 10
        kept = [torch.optim.SGD([weight], lr=0.1) for _ in range(100)]
        for optimizer in kept:
            optimizer.step()
        assert 70 <= w._steps - 10 <= 80


def test_phases_are_marked_and_in_the_samples():
    seen = []
    with outsize.watch(listeners=[seen.append]) as w, w.phase("evaluate"):
        wait_for_samples(w)
    marks = [item.name for item in seen if isinstance(item, Mark)]
    assert marks == ["evaluate", ""]
    assert "evaluate" in {item.phase for item in seen if isinstance(item, Sample)}


def test_a_listener_that_fails_is_dropped_with_one_warning():
    def fail(item):
        raise OSError("the server has gone")

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with outsize.watch(listeners=[fail]) as w:
            wait_for_samples(w)
    assert [str(one.message) for one in said if "listener" in str(one.message)] == [
        "a listener of outsize.watch failed and is dropped: OSError('the server has gone')"
    ]


def test_a_recording_is_written_while_it_runs_and_can_be_drawn(tmp_path):
    with outsize.watch(record=tmp_path / "run.watch") as w:
        wait_for_samples(w)
        assert not load(tmp_path / "run.watch").complete
    recording = load(tmp_path / "run.watch")
    assert recording.complete and len(recording.samples) == len(w.readings)
    assert recording.head.pid == os.getpid() and "RAM" in str(recording)
    w.report(tmp_path / "run.html")
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")


def test_an_error_inside_goes_through_and_is_in_the_recording(tmp_path):
    with pytest.raises(KeyError), outsize.watch(record=tmp_path / "run.watch"):
        raise KeyError("lr")
    assert load(tmp_path / "run.watch").marks[-1].name == "ended by KeyError"


def test_a_decorated_function_is_watched_at_each_call():
    @outsize.watch(0.05)
    def work(number):
        """Works."""
        time.sleep(0.12)
        return number + 1

    assert (work(1), work.__doc__) == (2, "Works.")
    first = work.watch
    assert work(2) == 3 and work.watch is not first and len(first.readings) >= 2


def test_mistakes_are_one_sentence():
    with pytest.raises(InputError, match="interval is the number of seconds"):
        outsize.watch(0)
    with pytest.raises(InputError, match="nothing was watched yet"):
        outsize.watch().recording()
    with outsize.watch() as w, pytest.raises(InputError, match="already running"):
        w.__enter__()


def test_a_forked_child_does_not_go_on_with_its_parents_watch():
    with outsize.watch() as w:
        child = os.fork()
        if child == 0:
            w.step()
            os._exit(w._steps)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_a_process_says_is_published_and_taken_back(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with outsize.watch() as w:
        w.step()
        wait_for_samples(w)
        said = publication.read_publication(publication.user_folder(), os.getpid())
        assert said.step == 1 and said.allocators[0].framework == "malloc"
    assert publication.read_publication(publication.user_folder(), os.getpid()) is None


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert not publication.is_ours(str(tmp_path / "open")) and not publication.is_ours(str(tmp_path / "none"))
    assert publication.make_folder(str(tmp_path / "own")) and publication.is_ours(str(tmp_path / "own"))
    (tmp_path / "own" / "watch.7").write_text('{"pid": 7, "time": "now"}')
    assert publication.read_publication(str(tmp_path / "own"), 7) is None


def test_a_snapshot_names_the_largest_tensors():
    import torch

    kept = torch.ones(3, 2**20)
    with outsize.watch() as w:
        sample = w.snapshot()
    assert "12.0 MiB (3, 1048576) float32 cpu" in sample.allocators[-1].tensors
    del kept


def test_in_a_notebook_the_view_is_renewed(monkeypatch):
    shown = []
    handle = types.SimpleNamespace(update=shown.append)
    display = types.ModuleType("IPython.display")
    display.display = lambda item, display_id: shown.append(item) or handle
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    with outsize.watch() as w:
        w.show()
        wait(lambda: shown.count(w) >= 2)
        assert "RAM" in w._repr_html_()


def test_a_function_runs_in_the_main_thread_between_two_instructions():
    seen = []
    thread = threading.Thread(target=lambda: run_in_main_thread(lambda: seen.append(threading.current_thread())))
    thread.start()
    while not seen:
        sum(range(1000))
    thread.join()
    assert seen == [threading.main_thread()]


def test_the_tracer_tells_the_line_that_adds_and_leaves_no_trace():
    kept = []

    def add():
        kept.append(bytearray(100_000))  # this line

    tracer = LineTracer({id(kept): lambda: len(kept)}, lambda: (read_malloc() + read_small()) or 0)
    assert tracer.start()
    for _ in range(5):
        add()
    tracer.stop()
    line = add.__code__.co_firstlineno + 1
    assert [spot.rpartition(":")[2] for spot in tracer.added[id(kept)]] == [str(line)]
    assert tracer.losing_line().endswith(f":{line}")
    assert sys.gettrace() is None and sys._getframe().f_trace is None


def test_beside_a_debugger_nothing_is_traced():
    tracer = LineTracer({}, lambda: 0)
    sys.settrace(lambda *_: None)
    try:
        assert not tracer.start()
    finally:
        sys.settrace(None)


class Holder:
    kept: ClassVar[list] = []

    def __init__(self):
        self.inner = {"rows": [1, 2]}


HELD = None


def test_names_lead_to_what_is_held():
    local = [object()]
    globals()["HELD"] = Holder()
    one, two, three = (
        find_holding(local, set()),
        find_holding(Holder.kept, set()),
        find_holding(HELD.inner["rows"], set()),
    )
    assert (one.name, two.name, three.name) == ("local", "Holder.kept", "Holder.inner.rows")


def test_each_further_element_counts_only_what_it_has_alone():
    shared = np.ones(10**6)
    elements = [{"model": shared, "data": np.ones(1000)} for _ in range(6)]
    assert 8000 <= measure_each(elements) <= 9500


SCRIPTED = {
    "requested_bytes.all.current": 3 * 2**20,
    "allocated_bytes.all.current": 4 * 2**20,
    "reserved_bytes.all.current": 20 * 2**20,
    "inactive_split_bytes.all.current": 2**20,
}


def scripted_torch(history):
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 1,
        memory_stats=lambda index: dict(SCRIPTED),
        memory=types.SimpleNamespace(
            _record_memory_history=lambda *words, **names: history.append(words[0]),
            _snapshot=lambda: {
                "segments": [
                    {
                        "device": 0,
                        "blocks": [
                            {
                                "state": "active_allocated",
                                "requested_size": 9,
                                "frames": [{"filename": __file__, "line": 5}],
                            },
                            {"state": "inactive", "size": 99, "frames": [{"filename": __file__, "line": 6}]},
                            {"state": "active_allocated", "requested_size": 50, "frames": []},
                        ],
                    }
                ]
            },
        ),
    )
    return types.SimpleNamespace(cuda=cuda)


def test_a_cards_allocator_is_read_through_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", scripted_torch([]))
    card = read_allocators()[-1]
    assert (card.device, card.requested, card.allocated, card.reserved, card.fragments) == (
        "cuda:0", 3 * 2**20, 4 * 2**20, 20 * 2**20, 2**20,
    )  # fmt: skip


def test_torchs_history_is_on_only_for_an_inspection_and_names_the_line(monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "torch", scripted_torch(calls))
    assert DeviceHistory.start("host") is None
    history = DeviceHistory.start("cuda:0")
    assert history.largest_line().endswith("test_watching.py:5")
    history.stop()
    assert calls == ["all", None]


def test_jax_and_tensorflow_are_read_only_once_they_have_started(monkeypatch):
    jax, bridge = types.ModuleType("jax"), types.ModuleType("jax._src.xla_bridge")
    device = types.SimpleNamespace(platform="gpu", id=0, memory_stats=lambda: {"bytes_in_use": 5, "pool_bytes": 9})
    jax.local_devices = lambda: [device]
    bridge._backends = {}
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)
    assert [one.framework for one in read_allocators()] == ["malloc"]
    bridge._backends = {"gpu": 1}
    assert (read_allocators()[-1].framework, read_allocators()[-1].requested) == ("jax", 5)
    assert {name: read() for name, read in device_meters().items()}["gpu:0"] == 5


def test_a_watch_adds_little_to_the_heap_and_gives_it_back():
    gc.collect()
    before = len(gc.get_objects())
    with outsize.watch():
        time.sleep(0.2)
    gc.collect()
    assert len(gc.get_objects()) - before < 20_000


WITHOUT = """
import sys, time
sys.modules["rich"] = sys.modules["numpy"] = None
import outsize
with outsize.watch() as w:
    time.sleep(0.2)
print(len(w.readings) > 0)
"""


def test_a_watch_needs_neither_numpy_nor_rich():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


class Node:
    """A step of an autograd graph that counts how often it is walked."""

    def __init__(self, *parents):
        self.parents, self.walked = parents, 0

    @property
    def next_functions(self):
        self.walked += 1
        return tuple((parent, 0) for parent in self.parents)


def tensors_of(nodes):
    return [types.SimpleNamespace(grad_fn=node) for node in nodes]


@pytest.mark.parametrize("order", [1, -1])
def test_the_graphs_of_a_state_that_is_never_detached_are_walked_once_and_not_once_for_each_tensor(order):
    leaf = Node()
    nodes = [leaf]
    for _ in range(2000):
        nodes.append(Node(nodes[-1], leaf))
    tensors = tensors_of(nodes[1:][::order])
    count, tail = find_largest_graph(tensors)
    assert count == 2001 and tail.grad_fn is nodes[-1]
    assert max(node.walked for node in nodes) <= 2


def test_of_graphs_that_have_nothing_in_common_the_largest_is_told_and_a_very_large_one_is_counted_to_an_end():
    def chain(length):
        node = Node()
        for _ in range(length - 1):
            node = Node(node)
        return node

    tensors = tensors_of([chain(5), chain(30), chain(7)])
    assert find_largest_graph(tensors) == (30, tensors[1]) and find_largest_graph([]) == (0, None)
    count, _ = find_largest_graph(tensors_of([chain(GRAPH_NODES + 500)]))
    assert count == GRAPH_NODES


def test_an_inspection_of_a_heap_that_takes_too_long_to_count_ends_with_a_note(monkeypatch):
    def slow(*_):
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return Census()

    monkeypatch.setattr(inspection, "take_census", slow)
    monkeypatch.setattr(inspection, "_BOUND", 0.05)
    monkeypatch.setattr(inspection.DeviceHistory, "start", lambda device: None)
    trend = Trend(grown=2**20, per_step=1024.0, per_second=2.0**20, steps=40)
    held = [0]
    look = Inspection(
        trend=trend,
        device="cuda:0",
        what="memory",
        meter=lambda: held[0],
        line_meter=lambda: 0,
        stepwise=True,
        ours=set(),
    )
    look.begin(0)
    held[0] += 2**20
    assert not look.done
    look.advance(40)
    assert look.done and not look.findings and sys.gettrace() is None
    assert "memory of cuda:0 grows, 1.00 KiB more each step; who keeps it is not looked for" in look.notes[0]


def test_what_lies_on_a_card_counts_there_and_other_arrays_do_not():
    torch = pytest.importorskip("torch")
    here, there = torch.zeros(1000), torch.zeros(2000, device="meta")
    elements = [(here, there, bytearray(500)), (torch.zeros(1000), torch.zeros(2000, device="meta"))]
    assert measure_each(elements[:1], "meta:0") == 8000 and measure_each(elements[:1], "cuda:0") == 0
    assert measure_each(elements[:1]) > 12500
    assert (buffer_bytes(there, "meta:0"), buffer_bytes(here, "meta:0"), buffer_bytes("x" * 9, "meta:0")) == (
        8000,
        0,
        0,
    )


def growing(device, rate, *, name="losses", where="train.py:16", **more):
    text = f"grows on {device}"
    return Finding(kind="list", device=device, text=text, advice="", name=name, where=where, per_second=rate, **more)


def test_a_culprit_that_grows_on_two_devices_is_one_finding_where_it_grows_most():
    host, card = growing("host", 15e3), growing("cuda:0", 1e6)
    assert newest([host, card]) == newest([card, host]) == (card,)
    assert newest([host, card, growing("cuda:0", 1e6, ended=True)]) == (host,)
    two_lines = growing("host", 15e3, where="train.py:20")
    assert newest([host, card, two_lines]) == (card, two_lines)


def test_what_grows_most_comes_first_and_what_has_no_line_last():
    slow, fast, unknown = growing("host", 1.0), growing("cuda:0", 9.0, name="a"), growing("cuda:0", 99.0, where=None)
    assert newest([unknown, slow, fast]) == (fast, slow, unknown)


def test_a_finding_says_when_the_limit_is_reached(monkeypatch):
    def sample(second):
        host = HostSample(rss=0, anonymous=second * 2**20, shared=0, used=second * 2**20, limit=100 * 2**20)
        card = GpuSample(index=1, name="a card", used=second * 2**20, free=0, total=120 * 2**20)
        return Sample(time=float(second), host=host, gpus=(card,))

    history = History()
    history.samples = [sample(second) for second in range(61)]
    assert history.full_in("host") == pytest.approx(40, abs=3)
    assert history.full_in("cuda:1") == pytest.approx(60, abs=4)
    assert history.full_in("cuda:0") is None and history.full_in("all") is None
    monkeypatch.setattr(History, "full_in", lambda self, device: {"host": 60.0}[device])
    with outsize.watch() as w:
        w._found(Finding(kind="list", device="host", text="t", advice="a", per_second=1e6))
        assert w.leaks()[0].full_in == 60.0
