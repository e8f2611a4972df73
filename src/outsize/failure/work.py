"""What the program was doing when memory ran out, as the text around the message shows it.

In: the text. Out: a `Work`. The same message asks for other advice while weights are loaded, while a model is trained, used
or served, and while a program with buttons paints. Where the text shows nothing of it, it is `UNKNOWN`, and the first advice
is one that holds for all of them.
"""

from __future__ import annotations

import enum
import re


class Work(enum.Enum):
    """What was being done."""

    SERVES = "an engine serves a model"
    """vLLM: flags of its own."""
    PAINTS = "a program with buttons makes pictures"
    """No line of code is the user's: flags of that program."""
    LOADS = "weights are brought to the device"
    """No batch can become smaller."""
    TRAINS = "a model is trained"
    INFERS = "a model is used"
    UNKNOWN = "the text does not say"


_END = re.compile(
    r"Tried to allocate|out of memory|ALLOC(?:ATION)?_FAILED|(?:not enough|can't allocate) memory", re.IGNORECASE
)
_NEAR = 700
"""Characters before the message in which the last frames of a traceback stand."""
_SERVES = re.compile(r"\bvllm[/\\.:]|VllmWorker|\bvllm serve\b|vLLM API server|\bfrom vllm\b")
_PAINTS = re.compile(
    r"ComfyUI|\bcomfy[/\\.]|webui|Fooocus|KSampler|InvokeAI|\bForge\b|sdnext|txt2img|img2img|"
    r"hires\.? ?fix|Hires|easydiffusion|\bSwarmUI",
    re.IGNORECASE,
)
_LOADS = re.compile(
    r"\bin (?:convert|_apply|_load\w*|load_\w+|create_weights|initialize_model|from_pretrained|set_module_tensor_to_device|"
    r"_materialize\w*|caching_allocator_warmup)\b|param_applied = fn\(|return t\.to\(\s?device|\.load_state_dict\(|"
    r"from_pretrained\(|nn\.Module\.(?:cuda|to)\(|\.safetensors\b|load_checkpoint_(?:in|and)",
)
_TRAINS = re.compile(
    r"\bbackward|optimizer|\btrain(?!ed)|fine-?tun|\bepoch|\bloss\b|\w+Trainer\b|训练|微调", re.IGNORECASE
)
_INFERS = re.compile(
    r"(?-i:\b[A-Z]\w+Pipeline\b)|\bpipe\(|\bpipeline\.|transcri|whisper|"
    r"pipelines?[/\\]|\.generate\(|\bin generate\b|\binference\b|\binfer\b|"
    r"\bdiffusers\b|attention_processor|denois|\bsampler?s?\b|k_diffusion|quick ?start|gradio|\bdemo\b|upscal|super_?resol|"
    r"generat\w{1,4} (?:\w{1,9} ){0,3}(?:image|picture|video|audio)|\bchat\b|run_\w*infer|推理",
    re.IGNORECASE,
)
_EVALUATES = re.compile(
    r"\bin (?:evaluate|validate|predict|test|infer\w*|compute_validation\w*|validation_step|test_step)\b"
)


def work_of(text: str) -> Work:
    """What the text shows was being done."""
    if _SERVES.search(text) is not None:
        return Work.SERVES
    paints, trains = _PAINTS.search(text) is not None, _TRAINS.search(text) is not None
    if paints and not trains:
        return Work.PAINTS
    if loads_weights(text):
        return Work.LOADS
    if trains:
        return Work.TRAINS
    return Work.INFERS if _INFERS.search(text) is not None else Work.UNKNOWN


def loads_weights(text: str) -> bool:
    """True where the last frames before the message bring weights to the device."""
    ends = [match.start() for match in _END.finditer(text)]
    near = text[max(0, ends[-1] - _NEAR) : ends[-1]] if ends else ""
    frames = near.rsplit("Traceback", 1)[-1].splitlines()[-8:]
    return any(_LOADS.search(line) is not None for line in frames)


def evaluates(text: str) -> bool:
    """True where the traceback goes through a function that evaluates."""
    return _EVALUATES.search(text) is not None
