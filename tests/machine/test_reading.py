import json
import os
import subprocess
import sys

import pytest
from cgroup import run
from hypothesis import given
from hypothesis import strategies as st

import outsize
from outsize.core.units import GiB, MiB
from outsize.machine import current_budget
from outsize.machine.disk import _is_ours
from outsize.machine.fake import FakeMachine


@pytest.mark.parametrize("cgroup", [1, 2])
def test_the_container_bites_before_the_machine(cgroup):
    with FakeMachine(total="64GiB", container="700MiB", container_used="100MiB", cgroup=cgroup):
        host = outsize.memory().host
    assert host.biting.name == "container"
    assert host.biting.bytes == 700 * MiB
    assert host.available == 600 * MiB


@pytest.mark.parametrize("cgroup", [1, 2])
def test_page_cache_does_not_count_as_used(cgroup):
    with FakeMachine(container="700MiB", container_used="100MiB", container_cache="500MiB", cgroup=cgroup):
        assert outsize.memory().host.available == 600 * MiB


def test_the_tightest_ancestor_counts():
    with FakeMachine(total="64GiB", container="8GiB") as system:
        parent = "/sys/fs/cgroup"
        system.files |= {f"{parent}/memory.max": str(2 * GiB), f"{parent}/memory.current": str(GiB // 2)}
        reading = outsize.memory()
    assert reading.host.available == 2 * GiB - GiB // 2
    assert reading.host.biting.source == f"{parent}/memory.max"


def test_a_container_that_shows_only_its_own_subtree_is_read_at_the_mount():
    with FakeMachine(total="64GiB", container="3GiB", cgroup=1) as system:
        mount = "/sys/fs/cgroup/memory"
        system.files["/proc/self/cgroup"] = "4:memory:/docker/abc\n"
        system.files["/proc/self/mountinfo"] = f"31 30 0:26 /docker/abc {mount} ro - cgroup cgroup rw,memory\n"
        system.files |= {f"{mount}/memory.limit_in_bytes": str(GiB), f"{mount}/memory.usage_in_bytes": "0"}
        assert outsize.memory().host.available == GiB


def test_version_one_tells_a_limit_of_an_ancestor_that_cannot_be_seen():
    with FakeMachine(total="64GiB", container="3GiB", cgroup=1) as system:
        system.files["/sys/fs/cgroup/memory/job/memory.stat"] += f"hierarchical_memory_limit {GiB}\n"
        assert outsize.memory().host.biting.bytes == GiB


def test_an_address_space_larger_than_ram_bites_where_more_than_ram_is_mapped():
    with FakeMachine(total="16GiB", address_space="20GiB") as system:
        system.files["/proc/self/status"] = f"VmSize: {18 * GiB // 1024} kB\n"
        host = outsize.memory().host
    assert host.available == 2 * GiB
    assert host.biting.name == "ulimit -v"


def test_address_space_is_a_limit_of_its_own():
    with FakeMachine(total="64GiB", address_space="1GiB"):
        host = outsize.memory().host
    assert host.biting.name == "ulimit -v"
    assert host.available == GiB - 200 * MiB


def test_the_commit_limit_counts_only_where_overcommit_is_off():
    with FakeMachine(total="16GiB", overcommit=2):
        reading = outsize.memory()
        assert reading.overcommit == "never"
        assert reading.host.biting.name.startswith("commit limit")
    with FakeMachine(total="16GiB", overcommit=0):
        assert outsize.memory().host.biting is None


def test_the_default_budget_is_four_fifths_of_what_is_available_and_says_why():
    with FakeMachine(total="16GiB", container="1GiB", gpus=[("RTX 4090", "24GiB", "20GiB")]):
        budget = outsize.memory().budget
        assert budget.host == int(0.8 * GiB)
        assert budget.device(0) == 16 * GiB
        assert "container" in budget.allowances[0].reason


def test_a_user_s_budget_is_taken_as_it_is_and_ends_with_its_block():
    with FakeMachine(total="16GiB", gpus=[("RTX 4090", "24GiB", "20GiB")]):
        default = current_budget().host
        with outsize.budget(host="2GiB", device="8GiB", scratch="/nvme"):
            inner = current_budget(devices=True)
            assert (inner.host, inner.device(0), inner.scratch) == (2 * GiB, 8 * GiB, "/nvme")
            with outsize.budget(host="1GiB"):
                assert current_budget(devices=True).device(0) == 8 * GiB
                assert current_budget().host == GiB
        assert current_budget().host == default


def test_holders_of_a_card_are_named():
    with FakeMachine(gpus=[("H200", "140GiB", "100GiB")], holders=[(4242, "python", "40GiB")]):
        text = str(outsize.memory())
    assert "pid 4242 python holds 40.00 GiB" in text
    assert "GPU 0 H200" in text


@given(
    total=st.integers(1, 2**50), available=st.integers(0, 2**50), limit=st.integers(1, 2**50), used=st.integers(0, 2**50),
    cgroup=st.sampled_from([1, 2]),
)  # fmt: skip
def test_available_never_passes_the_machine_or_any_limit(total, available, limit, used, cgroup):
    with FakeMachine(total=total, available=available, container=limit, container_used=used, cgroup=cgroup):
        reading = outsize.memory()
    assert 0 <= reading.host.available <= available
    assert reading.budget.host <= reading.host.available
    if limit < total // 1024 * 1024:
        assert reading.host.available <= max(0, limit - used)


def test_this_machine_reads_without_a_fake():
    reading = outsize.memory()
    assert 0 < reading.host.available <= reading.host.total
    assert reading.rss > MiB
    assert json.loads(json.dumps(reading.to_dict()))["host"]["total"] == reading.host.total
    assert "RAM" in reading._repr_html_()


def test_inside_a_real_container_the_limit_is_seen_and_said_to_bite():
    outcome = run([sys.executable, "-c", "import outsize; print(outsize.memory())"], 700 * MiB)
    assert outcome.status == 0, outcome.stderr
    ram = next(line for line in outcome.stdout.splitlines() if line.startswith("RAM"))
    assert ram.rstrip().endswith("container: 700.00 MiB")


def test_under_ulimit_the_address_space_is_seen_and_said_to_bite():
    code = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)); import outsize; print(outsize.memory())"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ram = next(line for line in outcome.stdout.splitlines() if line.startswith("RAM"))
    assert ram.rstrip().endswith("ulimit -v: 1.00 GiB")


def test_scratch_files_go_elsewhere_where_the_home_cannot_be_written(monkeypatch):
    for name in ("XDG_CACHE_HOME", "OUTSIZE_SCRATCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc")  # not even root can write there
    disk = outsize.memory().disk
    assert not disk.name.startswith("/proc") and disk.available > 0
    monkeypatch.setenv("OUTSIZE_SCRATCH", "/proc/mine")
    assert outsize.memory().disk.name == "/proc/mine"  # what was said is not second-guessed


def test_a_folder_in_a_shared_place_is_used_only_where_it_is_ones_own(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert [_is_ours(str(tmp_path / name)) for name in ("none yet", "real", "link")] == [True, True, False]
    monkeypatch.setattr("os.getuid", lambda: os.stat(tmp_path).st_uid + 1)
    assert not _is_ours(str(tmp_path / "real"))
