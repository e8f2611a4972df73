"""The fork server of the tests: forks end, fail, are killed and grow as fresh processes do."""

import os
import signal
import time

import forks

GROW = """
import sys, numpy
def read(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
before = read("VmHWM")
held = numpy.ones(int(sys.argv[1]), numpy.uint8)
print(read("VmHWM") - before, read("RssAnon"))
"""


def test_the_peak_of_a_fork_begins_at_its_own_start():
    for size in (64 << 20, 8 << 20):  # the second knows nothing of the first
        child = forks.start(GROW, str(size))
        out, err = child.communicate()
        assert child.returncode == 0, err
        assert size <= int(out.split()[0]) + (1 << 20) <= size + (5 << 20)


def test_a_fork_has_the_folder_and_the_environment_of_now_and_its_status_and_error_come_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTSIZE_OF_THIS_TEST", "here")
    (tmp_path / "script.py").write_text(
        "import os, sys\nprint(os.getcwd(), os.environ['OUTSIZE_OF_THIS_TEST'], *sys.argv[1:])\nraise KeyError('planted')"
    )
    child = forks.start(tmp_path / "script.py", "a", "b")
    out, err = child.communicate()
    assert out == f"{tmp_path} here a b\n"
    assert "KeyError: 'planted'" in err
    assert child.returncode == 1


def test_a_fork_can_be_killed(tmp_path):
    child = forks.start("import time\ntime.sleep(600)\n")
    assert child.poll() is None
    child.kill()
    child.communicate()
    assert child.returncode == child.poll() == -signal.SIGKILL
    for _ in range(2000):
        if not os.path.exists(f"/proc/{child.pid}"):
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the killed fork is still there")


ENDING = """
import atexit, os, sys, threading, time
def late():
    time.sleep(0.1)
    print("thread")
threading.Thread(target=late).start()
atexit.register(print, "exit")
print("end")
sys.exit(int(sys.argv[1]))
"""


def test_a_fork_ends_after_its_threads_and_what_it_registered_with_all_that_it_printed():
    for status in (0, 3):
        child = forks.start(ENDING, str(status))
        assert child.communicate() == ("end\nthread\nexit\n", "")
        assert child.returncode == status
    child = forks.start("import sys\nsys.exit('a reason')\n")
    assert child.communicate() == ("", "a reason\n")
    assert child.returncode == 1
