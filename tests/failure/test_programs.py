# ruff: noqa: E501  messages are kept whole
"""Whose program it was, and what it was doing, decide what is advised first."""

import pytest

import outsize
from outsize.core.failure import CauseName
from outsize.failure.program import programs_of, read_programs
from outsize.failure.work import Work, work_of

FULL = (
    "CUDA out of memory. Tried to allocate 90.00 MiB. GPU 0 has a total capacity of 16.00 GiB of which 12.00 MiB is free. Of the "
    "allocated memory 15.20 GiB is allocated by PyTorch, and 200.00 MiB is reserved by PyTorch but unallocated."
)
BARE = "RuntimeError: CUDA error: out of memory"


def first(text):
    diagnosis = outsize.explain(text)
    return diagnosis.cause.name, diagnosis.remedies[0].how


@pytest.mark.parametrize(
    ("text", "work"),
    [
        ('File "a.py", line 3, in train_one_epoch\n' + FULL, Work.TRAINS),
        ("it fails in the second validation\n" + FULL, Work.EVALUATES),
        ('File "trainer.py", line 9, in evaluation_loop\n' + FULL, Work.EVALUATES),
        ("    loss.backward()\nit worked in the validation step\n" + FULL, Work.TRAINS),
        ("python demo.py --image a.png\n" + FULL, Work.INFERS),
        ("I run inference with the model that I fine-tuned\n" + FULL, Work.INFERS),
        ("I train, and then I infer\n" + FULL, Work.UNKNOWN),
        ("text-generation-webui\n" + FULL, Work.UNKNOWN),
        ("stable-diffusion-webui, txt2img\n" + FULL, Work.PAINTS),
        ("/home/u/ComfyUI/.venv/lib/torch/x.py\n" + FULL, Work.UNKNOWN),
        ("    model = model.to(device)\n" + FULL, Work.LOADS),
        ("per_device_train_batch_size=4\n" + FULL, Work.TRAINS),
        (FULL, Work.UNKNOWN),
    ],
)
def test_signs_of_the_text_decide_what_was_being_done(text, work):
    assert work_of(text) is work


@pytest.mark.parametrize(
    ("text", "cause", "how"),
    [
        ("transformers/trainer.py, in training_step\n" + FULL, CauseName.TRUE_NEED, "--gradient_checkpointing"),
        ("transformers/trainer.py, in evaluation_loop\n" + FULL, CauseName.TRUE_NEED, "--eval_accumulation_steps"),
        ('"per_device_train_batch_size": 1, in training_step\n' + FULL, CauseName.TRUE_NEED, "load_in_4bit"),
        ("training with detectron2/engine/train_loop.py\n" + FULL, CauseName.TRUE_NEED, "IMS_PER_BATCH"),
        ("nnUNetv2_train 3 2d 0\nOne or more background workers are no longer alive.", CauseName.KILLED, "nnUNet_n_proc_DA"),
        ("deepspeed --num_gpus 1 train.py\n" + FULL, CauseName.TRUE_NEED, "offload_optimizer"),
        ('"offload_optimizer": {"device": "cpu"}\n' + BARE, CauseName.LIMIT, "pin_memory"),
        ("python -m fastchat.serve.cli\nmodel.generate(x)\n" + FULL, CauseName.TRUE_NEED, "--load-8bit"),
        ("predict with run_alphafold.py\nRESOURCE_EXHAUSTED: Out of memory while trying to allocate 9000000000 bytes.",
         CauseName.TRUE_NEED, "TF_FORCE_UNIFIED_MEMORY"),
        ("gaussian-splatting, python train.py\n" + FULL, CauseName.TRUE_NEED, "--data_device cpu"),
        ("python generate.py --task t2v-14B, Wan2.1\n" + FULL, CauseName.TRUE_NEED, "--offload_model"),
        ("python generate.py --offload_model True, Wan2.1\n" + FULL, CauseName.TRUE_NEED, "--frame_num"),
        ("In ComfyUI with --lowvram: " + FULL, CauseName.TRUE_NEED, "512 x 512"),
        ("batch size is 1, python train.py\n" + FULL, CauseName.TRUE_NEED, "half the height"),
        ("fine-tuning a 7B LLM, batch_size=1\n" + FULL, CauseName.TRUE_NEED, "load_in_4bit"),
        ("ollama run a:70b\nCUDA error: out of memory\n  current device: 0, in function alloc at ggml-cuda.cu:9", CauseName.TRUE_NEED, "num_gpu"),
        ("Llama(model_path, n_gpu_layers=99)\nCUDA error: out of memory at ggml-cuda.cu:9", CauseName.TRUE_NEED, "n_gpu_layers=20"),
        ("   82 yolo\n   83 route 79   1.0 BFLOPs\nCUDA Error: out of memory\ndarknet: ./src/cuda.c:36: check_error", CauseName.TRUE_NEED, "subdivisions"),
        ("F0101 syncedmem.cpp:7] Check failed: error == cudaSuccess (2 vs. 0)  out of memory", CauseName.TRUE_NEED, "prototxt"),
        ("training several models in a loop with keras\nOOM when allocating tensor with shape[32,900,900,8] and type float on /device:GPU:0",
         CauseName.LEAK, "clear_session"),
        ("object_detection/model_lib_v2.py\nOOM when allocating tensor with shape[32,900,900,8] and type float on /device:GPU:0",
         CauseName.TRUE_NEED, "pipeline.config"),
        ("sklearn/decomposition/_pca.py\nUnable to allocate 9.00 GiB for an array with shape (1000000, 1208) and data type float64",
         CauseName.TRUE_NEED, "partial_fit"),
        ("ad.read_h5ad(path)\nUnable to allocate 9.00 GiB for an array with shape (300000, 4027) and data type float64", CauseName.TRUE_NEED, "backed="),
        ("multiprocessing/pool.py, line 9, in get\nMemoryError", CauseName.TRUE_NEED, "Pool(2)"),
        ("pickle.dump(x, file)\nMemoryError", CauseName.TRUE_NEED, "mmap_mode"),
        ("nucmer -t 32 a.fa b.fa\nterminate called after throwing an instance of 'std::bad_alloc'", CauseName.TRUE_NEED, "nucmer"),
        ("libc++abi.dylib: terminating with uncaught exception of type std::bad_alloc", CauseName.TRUE_NEED, "time -l"),
        ("pip install torch\nCollecting torch\nKilled", CauseName.KILLED, "--no-cache-dir"),
        ("gitlab-runner[7]: WARNING: Job failed: exit code 137", CauseName.KILLED, "fewer parallel"),
        ("Last State: Terminated\n  Reason: Error\n  Exit Code: 137", CauseName.KILLED, "kubectl describe pod"),
        ("the container of web exited with code 137, docker compose", CauseName.KILLED, "docker inspect"),
        ("executor failed running [/bin/sh -c make]: exit code: 137\nmake: *** [all] Error 1", CauseName.KILLED, "Docker Desktop"),
        ("Out of memory: Killed process 7 (apache2) total-vm:900kB, anon-rss:800kB, file-rss:0kB", CauseName.MACHINE, "MaxRequestWorkers"),
        ("Out of memory: Killed process 7 (indexd) total-vm:900kB, anon-rss:800kB, file-rss:0kB", CauseName.MACHINE, "ps -C indexd"),
        ("nf-core: .command.log\nslurmstepd: error: Detected 1 oom_kill event in StepId=9.0.", CauseName.LIMIT, "withName"),
        ("org.apache.spark.sql.X\njava.lang.OutOfMemoryError: Java heap space", CauseName.LIMIT, "--driver-memory"),
        ("org.apache.catalina.X\njava.lang.OutOfMemoryError: Java heap space", CauseName.LIMIT, "CATALINA_OPTS"),
        ("java.lang.OutOfMemoryError: Requested array size exceeds VM limit", CauseName.TRUE_NEED, "split"),
        ("Could not reserve enough space for 4194304KB object heap", CauseName.ADDRESS_SPACE, "-Xmx1g"),
        ("Failed to allocate a 16 byte allocation with 900 free bytes and 900B until OOM, growth limit 268435456", CauseName.LIMIT, "heap dump"),
        ("runtime: out of memory: cannot allocate 9000000-byte block (9000000 in use)\nasm_386.s:7", CauseName.ADDRESS_SPACE, "uname -m"),
        ("fork/exec /usr/bin/x: cannot allocate memory", CauseName.ALREADY_FULL, "overcommit"),
        ("duckdb.OutOfMemoryException: Out of Memory Error: could not allocate block of size 256KB", CauseName.LIMIT, "threads = 2"),
        ("error: out of memory or dimension too large for Octave's index type", CauseName.TRUE_NEED, "sparse("),
        ("vkAllocateMemory: VK_ERROR_OUT_OF_DEVICE_MEMORY", CauseName.TRUE_NEED, "texture"),
        ("from vllm import LLM\nCUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 40.00 GiB total capacity; 22.00 GiB already allocated; "
         "500.00 MiB free; 22.00 GiB reserved in total by PyTorch)", CauseName.OTHER_PROCESS, "--gpu-memory-utilization 0.5"),
        ("export PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0\nin backward\nMPS backend out of memory (MPS allocated: 2.00 GB, other allocations: "
         "9.00 GB, max allowed: 11.00 GB).", CauseName.OTHER_ALLOCATIONS, "batch_size"),
        ("resume_from_checkpoint=a, in training_step\n" + FULL, CauseName.TRUE_NEED, 'map_location="cpu"'),
        ("FSDP: it fails while saving the model after training\n" + FULL, CauseName.TRUE_NEED, "offload_to_cpu"),
        ("python predict.py\nOOM when allocating tensor with shape[9,900,900,8] and type float on /device:GPU:0", CauseName.TRUE_NEED, "model.predict("),
        ("Killed process 7 (ray::shuffle) total-vm:900kB, anon-rss:800kB, file-rss:0kB", CauseName.MACHINE, "ray.remote"),
        ("memory keeps growing, after 300 steps in training: " + BARE, CauseName.LEAK, "loss.item()"),
    ],
)  # fmt: skip
def test_the_first_advice_is_the_programs_own(text, cause, how):
    said = first(text)
    assert said[0] == cause and how in said[1]


def test_code_for_an_array_is_not_advised_where_the_array_is_a_programs():
    text = "nnUNetv2_preprocess -d 3\nUnable to allocate 9.00 GiB for an array with shape (900, 1024, 1310) and data type float64"
    assert not any("outsize.open" in way.how and "stream it" in way.name for way in outsize.explain(text).remedies)


def test_a_kill_of_an_unknown_program_is_not_answered_in_python():
    ways = outsize.explain("./solver --all\nKilled").remedies
    assert "killed process" in ways[0].how and not any("outsize run" in way.how for way in ways)


def test_a_title_and_the_message_after_it_are_one_failure():
    title = "CUDA out of memory. Tried to allocate 40.00 GiB.\n"
    failure = outsize.explain(
        title + "what I ran\n" + title.strip() + " GPU 1 has a total capacity of 16.00 GiB"
    ).failure
    assert (failure.total_bytes, failure.device) == (16 * 2**30, "cuda:1")


def test_an_array_of_a_terabyte_is_asked_about_before_it_is_streamed():
    text = "Unable to allocate 1.24 TiB for an array with shape (4032, 3024, 13924) and data type float64"
    assert "print(x.shape)" in outsize.explain(text).remedies[0].how


def test_tensors_that_fill_the_card_are_not_taken_for_pieces():
    text = "CUDA out of memory. Tried to allocate 700.00 MiB (GPU 0; 24.00 GiB total capacity; 21.00 GiB already allocated; 0 bytes free; 23.00 GiB reserved in total by PyTorch)"
    assert outsize.explain(text).cause.name == CauseName.TRUE_NEED


def test_the_whole_card_is_no_fraction_of_it():
    text = FULL.replace("is free. ", "is free. 16.00 GiB allowed; ")
    assert outsize.explain(text).cause.name == CauseName.TRUE_NEED


def test_what_a_user_says_of_a_remark_is_not_taken_for_the_failure():
    text = "I got OOM?\nAllocator (GPU_0_bfc) ran out of memory trying to allocate 2.00GiB. The caller indicates that this is not a failure"
    assert outsize.explain(text).cause.name == CauseName.WARNING


def test_no_program_is_two_rows_and_none_matches_a_plain_message():
    names = [row.name for rows in read_programs().values() for row in rows]
    assert len(names) == len(set(names))
    assert programs_of(FULL, "pytorch") == ()
