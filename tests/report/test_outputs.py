"""Numbers out to loggers, TensorBoard, Prometheus and Perfetto: the same names and values everywhere."""

import dataclasses
import json
import urllib.error
import urllib.request

import pytest
from answers import array_plan, footprint, recording

import outsize
from outsize.core.outcomes.recording import Finding, Mark
from outsize.report.outputs.numbers import HELP, numbers
from outsize.report.outputs.openmetrics import MetricsServer, parse_address, to_text
from outsize.report.outputs.trace import to_trace

MiB = 2**20


class Wandb:
    """What a run of Weights & Biases has."""

    def __init__(self):
        self.rows = []

    def log(self, data, step=None):
        self.rows.append((step, dict(data)))


class Mlflow:
    """What MLflow's module and client have."""

    def __init__(self):
        self.rows = []

    def log_metric(self, key, value, step=None):
        self.rows.append((step, {key: value}))


class Writer:
    """What TensorBoard's writers have."""

    def __init__(self):
        self.rows = []

    def add_scalar(self, tag, value, step):
        self.rows.append((step, {tag: value}))


@pytest.mark.parametrize("kind", [Wandb, Mlflow, Writer])
def test_every_logger_gets_the_numbers_of_each_step_under_its_number(kind):
    logger = kind()
    listen = outsize.log_to(logger)
    samples = recording().samples
    for item in (*samples, Mark(time=1.0, kind="phase", name="x")):
        listen(item)
    found = {}
    for step, data in logger.rows:
        found.setdefault(step, {}).update(data)
    assert sorted(found) == list(range(20))
    assert found[3]["memory/host/anonymous_bytes"] == samples[15].host.anonymous
    assert found[3]["memory/torch/cuda:0/allocated_bytes"] == 120 * MiB
    assert found[3]["memory/0/used_bytes"] == 2**30


def test_without_steps_samples_are_logged_once_a_second_under_a_running_number():
    logger = Wandb()
    listen = outsize.log_to(logger)
    for sample in recording().samples:
        listen(dataclasses.replace(sample, step=None))
    assert [step for step, _ in logger.rows] == list(range(10))


def test_what_is_no_logger_is_said():
    with pytest.raises(outsize.InputError, match="is no logger"):
        outsize.log_to(object())


def test_tensorboard_reads_back_what_was_written(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from outsize.report.outputs.tensorboard import write_scalars

    write_scalars(recording(), tmp_path)
    found = accumulator.EventAccumulator(str(tmp_path))
    found.Reload()
    scalars = found.Scalars("memory/host/anonymous_bytes")
    assert [event.step for event in scalars] == list(range(20))
    assert scalars[2].value == 210 * MiB and scalars[2].wall_time == pytest.approx(1.8e9 + 1.0)


def test_prometheus_reads_the_text_and_every_name_has_a_meaning():
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    text = to_text(recording().samples[7], findings=1)
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert families["outsize_host_anonymous_bytes"].samples[0].value == 207 * MiB
    reserved = families["outsize_allocator_reserved_bytes"].samples[0]
    assert reserved.labels == {"framework": "torch", "device": "cuda:0"} and reserved.value == 200 * MiB
    assert families["outsize_growing"].samples[0].value == 1
    assert {number.name for number in numbers(recording().samples[0])} <= HELP.keys()


def test_a_port_answers_with_the_newest_sample_and_only_on_this_machine():
    samples = recording().samples
    with MetricsServer("127.0.0.1:0") as server:
        url = f"http://127.0.0.1:{server.port}"
        before = urllib.request.urlopen(f"{url}/metrics").read().decode()
        for item in (*samples, Finding(kind="list", device="host", text="", advice="")):
            server(item)
        answer = urllib.request.urlopen(f"{url}/metrics")
        text = answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/secrets")
        with pytest.raises(outsize.StoreError, match="choose another port"):
            MetricsServer(f"127.0.0.1:{server.port}")
    assert "outsize_host" not in before and before.endswith("# EOF\n")
    assert f"outsize_host_anonymous_bytes {samples[-1].host.anonymous}\n" in text and "outsize_growing 1\n" in text
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")


def test_an_address_is_a_port_here_or_a_host_and_a_port():
    assert parse_address(":9400") == ("127.0.0.1", 9400)
    assert parse_address("0.0.0.0:9400") == ("0.0.0.0", 9400)
    assert parse_address("[::1]:9400") == ("::1", 9400)
    for wrong in ("9400", "host", ":", ":port", ":99999"):
        with pytest.raises(outsize.InputError, match="no address"):
            parse_address(wrong)


def test_a_trace_has_counters_phases_and_marks_in_microseconds():
    events = json.loads(to_trace(recording()))["traceEvents"]
    counters = [event for event in events if event["ph"] == "C" and event["name"].startswith("RAM")]
    assert counters[10]["ts"] == 1e6 and counters[10]["args"]["the processes' own"] == 210 * MiB
    assert {"train", "evaluate"} <= {event["name"] for event in events if event["ph"] == "i"}
    slices = [event for event in events if event["ph"] == "X"]
    assert slices and all(event["dur"] >= 0 for event in slices)
    assert any(event["ph"] == "C" for event in json.loads(to_trace(footprint()))["traceEvents"])
    with pytest.raises(outsize.InputError, match="no timeline"):
        to_trace(array_plan())
