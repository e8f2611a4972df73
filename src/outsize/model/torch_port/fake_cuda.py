"""`torch.cuda` and `torch.accelerator` of a card that is not there.

In: what the card is. Out: rows for `patches.replaced`, with which both answer as if the card were there, and do nothing. The
default wheels of torch are built for CUDA. They look for a driver at the first such call, also on a machine without a
card.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from outsize.model.torch_port.dispatch import map_tensors
from outsize.model.torch_port.parts import is_older_than, part
from outsize.model.torch_port.patches import Row


def card_rows(index: int, capability: tuple[int, int], total: int, accelerator: bool, there: bool = True) -> list[Row]:
    """What stands in the place of torch's own; `accelerator`: the step runs on the card; `there`: one is found."""
    if is_older_than("2.8"):  # whoever makes an optimizer loads it, and it looks at classes that are replaced here
        part("_dynamo")
    properties = SimpleNamespace(
        name="outsize card", major=capability[0], minor=capability[1], total_memory=total, multi_processor_count=132,
        gcnArchName="", warp_size=32, max_threads_per_multi_processor=2048,
    )  # fmt: skip
    both: dict[str, Any] = {
        "is_available": there, "device_count": int(there), "synchronize": None, "empty_cache": None, "current_stream": Stream(),
        "reset_peak_memory_stats": None, "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0,
        "max_memory_reserved": 0, "memory_stats": {},
    }  # fmt: skip
    cuda: dict[str, Any] = {
        **both, "current_device": index, "get_device_properties": properties, "get_device_capability": capability,
        "get_device_name": properties.name, "is_bf16_supported": True, "manual_seed": None, "manual_seed_all": None,
        "seed": None, "set_device": None, "reset_max_memory_allocated": None, "mem_get_info": (total, total),
        "_lazy_init": None, "init": None, "is_initialized": True, "ipc_collect": None, "set_rng_state": None,
        "_exchange_device": index, "_maybe_exchange_device": index,
        "is_current_stream_capturing": False, "memory_summary": "", "default_stream": Stream(),
        "set_per_process_memory_fraction": None,
    }  # fmt: skip
    rows: list[Row] = [(torch.cuda, name, answer(value)) for name, value in cuda.items()]
    rows += [
        (torch.cuda, "get_rng_state", _random_state),
        (torch.cuda, "Stream", Stream), (torch.cuda, "Event", Stream), (torch.cuda, "stream", _stream),
        (torch.cuda, "device", _stream), (torch.cuda.amp.common, "amp_definitely_not_available", answer(False)),
        (torch.Tensor, "record_stream", answer(None)), (torch.nn.DataParallel, "scatter", _scatter),
    ]  # fmt: skip
    if hasattr(torch, "accelerator"):  # since torch 2.6
        answers: dict[str, Any] = {
            **both, "current_accelerator": torch.device("cuda") if accelerator else None, "current_device_index": index,
            "current_device_idx": index, "set_device_index": None, "set_device_idx": None, "set_stream": None,
            "reset_accumulated_memory_stats": None, "get_memory_info": (total, total),
        }  # fmt: skip
        rows += [(torch.accelerator, name, answer(value)) for name, value in answers.items()]
        rows += [(torch.accelerator, "device_index", _stream)]
    return rows


def answer(value: Any) -> Callable[..., Any]:
    """A function that gives one value whatever it is asked."""
    return lambda *args, **kwargs: value


class Stream:
    """Stands for CUDA streams and events: work is in order, so there is nothing to wait for."""

    cuda_stream = stream_id = device_index = 0
    device_type = 1
    """CUDA's number among torch's kinds of devices."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or Stream()

    def __getattr__(self, name: str) -> Any:
        return answer(0.0 if name == "elapsed_time" else name == "query")


def _scatter(parallel: Any, inputs: Any, kwargs: Any, device_ids: list[Any]) -> tuple[list[Any], list[Any]]:
    """All of a batch goes to the one card that is there."""
    card = f"cuda:{device_ids[0]}"
    inputs, kwargs = (map_tensors(lambda tensor: tensor.to(card), value) for value in (inputs, kwargs))
    return [inputs], [kwargs]


def _random_state(*args: Any, **kwargs: Any) -> Any:
    """What the compiler keeps before it works and puts back after it."""
    return torch.empty(16, dtype=torch.uint8, device="cpu")


def _stream(*args: Any, **kwargs: Any) -> Stream:
    return Stream()
