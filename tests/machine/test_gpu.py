"""The GPU readers against scripted drivers: no card is needed to know that a card is read right."""

import sys
import types

import pytest

from outsize.core.units import GiB
from outsize.machine.fake import FakeMachine
from outsize.machine.gpu import read_devices


class NVMLError(Exception):
    pass


def scripted_nvml(cards: int, *, fails: bool = False) -> types.ModuleType:
    def init() -> None:
        if fails:
            raise NVMLError("driver not loaded")

    def graphics(handle: int) -> list[object]:
        raise NVMLError("not supported")

    module = types.ModuleType("pynvml")
    module.NVMLError = NVMLError
    module.nvmlInit = init
    module.nvmlShutdown = lambda: None
    module.nvmlDeviceGetCount = lambda: cards
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetUUID = lambda handle: f"GPU-aaaa{handle}"
    module.nvmlDeviceGetName = lambda handle: f"Card {handle}".encode()
    module.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=24 * GiB, free=(20 - handle) * GiB)
    module.nvmlDeviceGetComputeRunningProcesses = lambda handle: [
        types.SimpleNamespace(pid=99999991, usedGpuMemory=GiB), types.SimpleNamespace(pid=99999992, usedGpuMemory=None),
        types.SimpleNamespace(pid=99999993, usedGpuMemory=3 * GiB),
    ]  # fmt: skip
    module.nvmlDeviceGetGraphicsRunningProcesses = graphics
    return module


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["Card 0", "Card 1", "Card 2"]), ("2,0", ["Card 2", "Card 0"]), ("", []), ("1,9,0", ["Card 1"]),
        ("GPU-aaaa2", ["Card 2"]), ("-1", []),
    ],
)  # fmt: skip
def test_devices_are_numbered_as_cuda_numbers_them(monkeypatch, visible, names):
    monkeypatch.setitem(sys.modules, "pynvml", scripted_nvml(3))
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with FakeMachine(environ=environ) as system:
        devices, notes = read_devices(system)
    assert [device.name for device in devices] == names
    assert [device.pool.index for device in devices] == list(range(len(names)))
    assert notes == ()


def test_holders_come_largest_first_and_an_unknown_share_stays_unknown(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", scripted_nvml(1))
    with FakeMachine() as system:
        (device,), _ = read_devices(system)
    assert [(holder.pid, holder.bytes) for holder in device.holders] == [
        (99999993, 3 * GiB), (99999991, GiB), (99999992, None),
    ]  # fmt: skip
    assert device.available == 20 * GiB


def scripted_torch(**cuda: object) -> types.SimpleNamespace:
    answers = {"is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1}
    return types.SimpleNamespace(cuda=types.SimpleNamespace(**{**answers, **cuda}))


def test_torch_answers_where_the_driver_library_does_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", scripted_nvml(0, fails=True))
    torch = scripted_torch(
        mem_get_info=lambda index: (10 * GiB, 24 * GiB), get_device_name=lambda index: "Card",
        get_per_process_memory_fraction=lambda index: 0.25, memory_reserved=lambda index: GiB,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", torch)
    with FakeMachine() as system:
        (device,), _ = read_devices(system)
    assert (device.total, device.source) == (24 * GiB, "torch")
    assert device.limits[0].name == "memory fraction"
    assert device.limits[0].available == 5 * GiB


def test_a_card_that_torch_has_not_started_is_left_asleep_and_said_to_be_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", scripted_nvml(0, fails=True))
    monkeypatch.setitem(sys.modules, "torch", scripted_torch(is_initialized=lambda: False))
    with FakeMachine() as system:
        devices, notes = read_devices(system)
    assert devices == ()
    assert "1 GPU(s) seen by torch" in notes[0]


def test_a_driver_without_any_library_is_said_to_be_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", scripted_nvml(0, fails=True))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with FakeMachine() as system:
        system.files["/proc/driver/nvidia/version"] = "NVRM version: 580\n"
        devices, notes = read_devices(system)
    assert devices == ()
    assert "outsize[gpu]" in notes[0]
