"""What the program was doing when memory ran out, as the text around the message shows it.

In: the text. Out: a `Work`. The same message asks for other advice while weights are loaded, while a model is trained, used
or served, and while a program with buttons paints. Every sign in the text speaks for one work with a weight: a frame of the
last traceback most, a name of a file or an option less, a word of the user least. The heaviest wins; where the text shows
nothing, or two works alike, it is `UNKNOWN`, and the first advice is one that holds for all of them.
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
    SAVES = "a checkpoint is gathered and written"
    """It takes what training did not: whole weights, or a copy of them."""
    EVALUATES = "a model is evaluated during or after its training"
    INFERS = "a model is used"
    UNKNOWN = "the text does not say"


_END = re.compile(
    r"Tried to allocate|out of memory|Failed to allocate|Attempting to (?:allocate|reserve)|Allocation on device|"
    r"ALLOC(?:ATION)?_FAILED|RESOURCE_EXHAUSTED|(?:not enough|can't allocate) memory",
    re.IGNORECASE,
)
_RAISED = re.compile(r"^(?:\[?\w+\]?:? {0,4}|E +|> ?)?(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b", re.MULTILINE)
"""A line that ends a traceback."""
_BROUGHT = re.compile(
    r"(?:moving|loading|sending|moved|copying) (?:the )?(?:model|device|pipeline|weights|checkpoint|transformer|unet)?[^\n]{0,40}"
    r"\b(?:to|on|onto) (?:the )?(?:cuda|gpu|device)\b|^\W*(?:load model begin|initializing pipeline|loading (?:the )?model)\b",
    re.IGNORECASE | re.MULTILINE,
)
"""A program's own log that weights are on their way."""
_NEAR = 700
"""Characters before the message in which the last frames of a traceback stand."""
_SAVES = re.compile(
    r"\bin (?:_?save\w*|state_dict|_full_state_dict\w*|\w*state_dict_hook|full_optim_state_dict|"
    r"gather_full_\w+|_zero3_consolidated\w*)\b|"
    r"\.save_(?:pretrained|model|checkpoint|16bit_model)\(|torch\.save\(|returning from state_dict\(\)|"
    r"(?:while|when|during|at|before|after)(?: the)? (?:saving|save of|writing)\b|"
    r"(?:fails?|crash\w*|OOM|out of memory)[^\n.]{0,40}\b(?:when|while|on|during|at) (?:saving|checkpointing|saves?)\b|"
    r"\b(?:save_model_and_optimizer|safe_save_model\w*)|保存(?:模型|ckpt|checkpoint)",
    re.IGNORECASE,
)
_SERVES = re.compile(
    r"\(EngineCore(?:_DP[0-9]+)? pid=|\bvllm[/\\.:]|VllmWorker|\bvllm serve\b|vLLM API server|\bfrom vllm\b"
)
_PAINTS = re.compile(
    r"ComfyUI(?![/\\]\.?v?env)|\bcomfy[/\\.]|(?:stable-diffusion-|sd-|sd\.|a1111 |automatic1111 )webui|webui-user|"
    r"--(?:med|low)vram|"
    r"modules[/\\](?:processing|sd_|txt2img)|Fooocus|KSampler|InvokeAI|\bForge\b|sdnext|sd\.next|txt2img|img2img|"
    r"hires\.? ?fix|Hires|easydiffusion|easy diffusion|unloading all loaded models|Stable diffusion model failed "
    r"to load|load_SD_model|webui\.(?:cmd|bat|py)\b|(?:installation of|bug in the|version of the) webui\b|"
    r"automatic1111|\bSwarmUI|checkpoint merger",
    re.IGNORECASE,
)
_LOADS = re.compile(
    r"\bin (?:convert|_apply|_load\w*|load_\w+|create_weights|initialize_model|from_pretrained|set_module_tensor_to_device|"
    r"_materialize\w*|caching_allocator_warmup|restore_location|_cuda_deserialize|persistent_load|"
    r"_legacy_load)\b|torch\.load\(|param_applied = fn\(|return t\.to\(\s?device|\.load_state_dict\(|"
    r"_configure_distributed_model|_move_model_to_device|\w*(?:model|module|net|pipe|pipeline)\w*\.(?:to|cuda)\(|"
    r"from_pretrained\(|from_preset\(|replicate\(params|device_put_replicated|"
    r"\b(?:does(?:n't| not)|can(?:not|'t)|fails? to) load\b|\bself\.init_\w*map\(|\bmodel\.init\(|"
    r"nn\.Module\.(?:cuda|to)\(|\.safetensors\b|load_checkpoint_(?:in|and)",
)
_FRAME, _NAME, _WORD = 8, 3, 2

# Rows of a table: the work a sign speaks for, how much it weighs, the sign.
# fmt: off
_SIGNS: tuple[tuple[Work, int, re.Pattern[str]], ...] = (
    (Work.TRAINS, _FRAME, re.compile(
        r"\.backward\(|\bin backward\b|_engine_run_backward|run_backward|optimi[sz]er\.step\(|(?m:\bin step(?:$|\())|"
        r"training_step|"
        r"train_(?:one_)?epoch|\bin (?:train|fit|train_step|run_train\w*|_inner_training_loop)\b|trainer\.(?:train|fit)\(|"
        r"\.train\(\)|compute_loss|\bloss\.\w")),
    (Work.EVALUATES, _FRAME + 1, re.compile(
        r"\bin (?:evaluate\w*|validate|evaluation_loop|prediction_step|test|compute_validation\w*|validation_step|test_step|"
        r"val_epoch|eval_\w+|validate_epoch|_run_validation|run_validation)\b|second validation|"
        r"(?:during|in|on|at|after|when|while|before|start of|begin(?:ning)? of)(?: the)? (?:first |\w+ )?"
        r"(?:validat(?:ion|ing)|evaluat(?:ion|ing)|eval)\b|"
        r"\b(?:when|once|as soon as|until|before|each time)\b[^\n.]{0,70}\b(?:evaluat|validat)(?:ed?|es|ing|ion)\b[^\n]{0,80}"
        r"\b(?:memory|OOM|crash\w*|fails?|error)\b|\bEVAL_PERIOD\b", re.IGNORECASE)),
    (Work.INFERS, _FRAME - 1, re.compile(
        r"\bin (?:generate|sample\w*|predict\w*|infer\w*|_sample|p_sample\w*|encode|transcribe|decode|run_inference|"
        r"inference_\w+|upscale|enhance|denoise|separate)\b|pipeline_\w+\.py|\.generate\(|\.predict\(|\bpipe\(|\.transcribe\(|"
        r"run_\w*infer|attention_processor|k_diffusion|pipelines?[/\\]|model_implementations|init_inference")),
    (Work.TRAINS, _NAME, re.compile(
        r"(?<![a-z])train\w*\.(?:py|sh)|finetun\w*\.(?:py|sh)|fine_tune\w*\.(?:py|sh)|"
        r"pretrain\w*\.(?:py|sh)|\w+Trainer\b|train_batch_size|"
        r"\b(?:yolo|nnUNetv2_|mim|axolotl|swift|llamafactory-cli)[ _]?(?:task=\w+ )?(?:mode=)?(?:train|sft|pt)\b",
        re.IGNORECASE)),
    (Work.INFERS, _NAME, re.compile(
        r"\b(?:infer\w*|demo\w*|predict\w*|generate\w*|sampl\w+|app|webui|gradio\w*|cli_demo|web_demo|inpaint\w*|upscal\w*|"
        r"transcrib\w*|chat\w*|run_\w*(?:infer|demo|gradio))\.(?:py|ipynb|sh)|(?-i:\b[A-Z]\w+Pipeline\b)|gradio[/\\]|"
        r"\bpipeline\.|--prompt\b", re.IGNORECASE)),
    (Work.TRAINS, _WORD, re.compile(
        r"(?<![a-z])train(?!ed)|fine[- ]?tun(?!ed)|\bepochs?\b|\bloss\b|optimi[sz]er|\bbackward|gradient accum|"
        r"训练|微调|\bSFT\b|\bLoRA rank",
        re.IGNORECASE)),
    (Work.INFERS, _WORD, re.compile(
        r"\binferenc(?:e|ing)\b|\binfer\b|transcri|whisper|\bdiffusers\b|denois|\bsamplers?\b|quick ?start|"
        r"\bdemo\b|upscal|super_?resol|"
        r"generat\w{1,4} (?:\w{1,9} ){0,3}(?:image|picture|video|audio|speech|text|response)|\bchat\b|推理|"
        r"text.to.(?:speech|video|image)|\b(?:when|while|during|was|for) testing\b|\b(?:test|"
        r"testing) (?:code|program|images?|set)\b",
        re.IGNORECASE)),
)
# fmt: on


def work_of(text: str) -> Work:
    """What the text shows was being done."""
    if _SERVES.search(text) is not None:
        return Work.SERVES
    weights: dict[Work, int] = {}
    for work, weight, sign in _SIGNS:
        if sign.search(text) is not None:
            weights[work] = weights.get(work, 0) + weight
    trains, infers = weights.get(Work.TRAINS, 0), weights.get(Work.INFERS, 0)
    if _PAINTS.search(text) is not None and trains <= _WORD + _NAME:
        return Work.PAINTS
    if saves_weights(text):
        return Work.SAVES
    if loads_weights(text):
        return Work.LOADS
    if weights.get(Work.EVALUATES, 0) > 0 and ".backward(" not in text and infers <= trains + _FRAME:
        return Work.EVALUATES
    if trains == infers:
        return Work.UNKNOWN
    return Work.TRAINS if trains > infers else Work.INFERS


def saves_weights(text: str) -> bool:
    """True where the last frames before the message, or the user's own words, write a checkpoint."""
    ends = [match.start() for match in _END.finditer(text)]
    near = text[max(0, ends[-1] - _NEAR) : ends[-1] + 200] if ends else text[:_NEAR]
    return _SAVES.search(near) is not None and re.search(r"\.backward\(|\bin backward\b", near) is None


def loads_weights(text: str) -> bool:
    """True where the last frames before the message bring weights to the device."""
    ends = [match.start() for match in _END.finditer(text)]
    near = text[max(0, ends[-1] - _NEAR) : ends[-1]] if ends else ""
    line = text[text.rfind("\n", 0, ends[-1]) + 1 : ends[-1]] if ends else ""
    after = text[ends[-1] :].partition("Traceback (most recent call last)")[2] if ends else ""
    last = "" if _RAISED.match(line) is not None and "  File " in near else after  # a log may tell the end first
    frames = last.splitlines()[:8] or near.rsplit("Traceback", 1)[-1].splitlines()[-8:]
    if any(_LOADS.search(line) is not None for line in frames):
        return True
    said = near.rpartition("Traceback")
    quoted = "  File " not in said[2] and after == "" and _BROUGHT.search(said[0] or said[2]) is not None
    return bool(ends) and quoted
