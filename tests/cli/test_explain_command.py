"""`outsize explain`: a file, a pipe, JSON, and what to paste."""

import json
import os
import subprocess
import sys
import threading

from failure_messages import FRAGMENTED

from outsize.cli import main


def pipe(text, *words):
    line = [sys.executable, "-m", "outsize", "explain", *words]
    return subprocess.run(line, input=text, capture_output=True, text=True, timeout=900)


def test_a_piped_message_is_explained():
    answer = pipe(FRAGMENTED, "-")
    assert answer.returncode == 0 and "cause: fragmentation" in answer.stdout


def test_json_holds_the_same_answer():
    answer = pipe(FRAGMENTED, "-", "--json")
    assert json.loads(answer.stdout)["cause"]["name"] == "fragmentation"


def test_a_log_file_is_explained(tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_text("epoch 1\n" * 1000 + FRAGMENTED + "\n")
    assert main(["explain", str(log)]) == 0
    assert "cause: fragmentation" in capsys.readouterr().out


def test_a_text_that_is_no_failure_ends_with_1(tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_text("all is well\n")
    assert main(["explain", str(log)]) == 1
    assert "Not an out-of-memory failure" in capsys.readouterr().out


def test_a_message_given_as_the_argument_is_explained(capsys):
    assert main(["explain", FRAGMENTED]) == 0
    assert "cause: fragmentation" in capsys.readouterr().out


def test_a_missing_file_is_a_mistake_with_a_way_out(capsys):
    assert main(["explain", "nowhere.log"]) == 2
    assert "pipe it in" in capsys.readouterr().err


def test_a_folder_is_called_one_and_a_named_pipe_is_read(tmp_path, capsys):
    assert main(["explain", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(FRAGMENTED,))
    writer.start()
    assert main(["explain", str(tmp_path / "pipe")]) == 0
    writer.join()
    assert "cause: fragmentation" in capsys.readouterr().out
