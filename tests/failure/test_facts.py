"""First advice follows from the facts of the text: what is in use already, what was free, what was being done."""

import pytest

from outsize.core.failure import CauseName, Exactness, Remedy
from outsize.core.noun import Known
from outsize.failure.explain import explain
from outsize.failure.remedies.in_use import left_to_do

TORCH = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 39.49 GiB of which "
    "300.00 MiB is free. Of the allocated memory 36.00 GiB is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but "
    "unallocated."
)


def way(how):
    return Remedy(name="", saves=None, known=Known.ESTIMATE, costs="", exactness=Exactness.BITWISE, how=how)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("--gpu-memory-utilization 0.95", "vllm serve m --gpu-memory-utilization 0.95"),
        ("--gpu-memory-utilization 0.95", "LLM(m, gpu_memory_utilization=0.97)"),
        ("--max-model-len 4096   # less than yours", "--max-model-len 2048"),
        ("--lowvram   # when it is started", "python main.py --lowvram --preview"),
        ('"pin_memory": false', '"offload_param": {"pin_memory": false}'),
    ],
)
def test_what_is_in_use_is_not_advised(how, text):
    assert left_to_do(way(how), text) is None


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("--gpu-memory-utilization 0.95", "vllm serve m --gpu-memory-utilization 0.7"),
        ("--gpu-memory-utilization 0.95", "Try increasing `gpu_memory_utilization` when initializing the engine."),
        ("PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 python x.py", "Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable it"),
        ("--max-model-len 4096   # less than yours", "--max-model-len 32768"),
        ("-c 4096 --cache-type-k q8_0", "-c 50000 --cache-type-k q8_0"),
        ("nvidia-smi", "nvidia-smi says 3 MiB"),
    ],
)
def test_what_is_not_in_use_stays(how, text):
    assert left_to_do(way(how), text) == way(how)


def test_a_heap_that_was_raised_is_raised_further():
    text = "NODE_OPTIONS=--max-old-space-size=8192 npm run build\nFATAL ERROR: Reached heap limit Allocation failed"
    assert explain(text).remedies[0].how == "NODE_OPTIONS=--max-old-space-size=16384"


def test_no_container_limits_a_card():
    text = (
        "I tensorflow/core/common_runtime/bfc_allocator.cc:698] Stats:\nLimit: 7967745639\nInUse: 7763010560\n"
        "W tensorflow/core/common_runtime/bfc_allocator.cc:270] Ran out of memory trying to allocate 8.00GiB."
    )
    assert not any("docker" in remedy.how for remedy in explain(text).remedies)


def test_memory_that_is_said_to_be_free_makes_it_a_limit():
    array = "MemoryError: Unable to allocate 20.0 MiB for an array with shape (2621440,) and data type float64"
    text = f"There are 900 GB of free memory on the node.\n{array}"
    diagnosis = explain(text)
    assert diagnosis.cause.name == CauseName.LIMIT and "ulimit -v" in diagnosis.remedies[0].how


def test_a_checkpoint_that_is_written_gathers_in_ram():
    diagnosis = explain(f'  File "train.py", line 9, in save_checkpoint\n    state = model.state_dict()\n{TORCH}')
    assert "offload_to_cpu=True" in diagnosis.remedies[0].how
    assert "outsize.fit" not in "".join(remedy.how for remedy in diagnosis.remedies)


def test_a_file_is_read_into_ram():
    text = f'  File "a.py", line 3, in <module>\n    torch.load(path)\n{TORCH}'
    assert 'map_location="cpu"' in explain(text).remedies[0].how
    told = text.replace("load(path)", 'load(path, map_location="cpu")')
    assert not any("map_location" in remedy.how for remedy in explain(told).remedies)


def test_a_handle_without_room_has_two_causes():
    diagnosis = explain("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert not diagnosis.cause.certain and "index out of range" in diagnosis.cause.text
    assert "CUDA_LAUNCH_BLOCKING" in diagnosis.remedies[0].how


def test_a_card_that_gives_nothing_is_not_full():
    text = (
        "RuntimeError: MPS backend out of memory (MPS allocated: 0 bytes, other allocations: 0 bytes, max allowed: 7.93 GB). "
        "Tried to allocate 256 bytes on shared pool."
    )
    diagnosis = explain(text)
    assert diagnosis.cause.name == CauseName.REFUSED and "cpu" in diagnosis.remedies[0].how


def test_promised_memory_of_windows_is_no_programs_ram():
    text = "import xgboost\nOSError: [WinError 1455] The paging file is too small for this operation to complete."
    assert "page file" in explain(text).remedies[0].name


def test_ram_that_is_said_to_be_full_ended_the_process():
    diagnosis = explain("My RAM is full and then: exits with return code = -9")
    assert diagnosis.cause.name == CauseName.MACHINE and not diagnosis.cause.certain


def test_weights_that_did_not_fit_are_no_matter_of_inputs():
    text = "ResourceExhaustedError: OOM when allocating tensor with shape[2048,1024], though the batch size is 1"
    assert "batch" not in explain(text).remedies[0].name


def test_a_kill_is_none_of_the_cards():
    text = "Docker on Windows 11 exits with code 137\nGPU: RTX 3060"
    assert "nvidia-smi" not in explain(text).remedies[0].how


def test_the_last_heap_counts():
    text = "MAVEN_OPTS= -Xmx4096m -Xmx512m\njava.lang.OutOfMemoryError: Java heap space"
    diagnosis = explain(text)
    assert "the last one counts" in diagnosis.cause.text and "-Xmx512m" in diagnosis.remedies[0].how


def test_frames_in_ram_are_fewer_pictures():
    text = "numpy.core._exceptions._ArrayMemoryError: Unable to allocate {} for an array with shape {} and data type {}"
    many = explain(text.format("3.72 GiB", "(361, 1440, 2560, 3)", "uint8"))
    assert many.remedies[0].name == "fewer or smaller pictures in RAM: 361 pictures of 1440 x 2560 at once"
    assert "pictures" not in explain(text.format("30.0 GiB", "(4026531840,)", "float64")).remedies[0].name


def test_ram_that_is_told_bounds_what_is_asked_for():
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 116813856768 bytes. I got {} of ram"
    assert explain(text.format("16GB")).cause.name == CauseName.LARGER_THAN_MACHINE
    assert explain(text.format("256GB")).cause.name == CauseName.TRUE_NEED
    assert explain(text.format("16GB").replace("ram", "VRAM")).cause.name == CauseName.TRUE_NEED


def test_what_windows_promises_is_not_what_is_free():
    text = "C:\\x.bat DefaultCPUAllocator: not enough memory: you tried to allocate 151781376 bytes, with 10GB of RAM available"
    diagnosis = explain(text)
    assert "promise" in diagnosis.cause.text and diagnosis.remedies[0].name == "enlarge the page file"


def test_a_limit_in_use_is_raised_by_its_bytes_and_not_past_the_machine():
    text = (
        "Memory limit (for query) exceeded: would use 100.01 GiB, maximum: 100.00 GiB\nMachine has 125 GB of memory.\n"
        "max_memory_usage=100GB"
    )
    assert explain(text).remedies[0].how == f"SET max_memory_usage = {125 * 2**30}"


def test_what_is_left_of_a_line_of_options_is_advised():
    found = left_to_do(
        way("--train_batch_size 1 --gradient_checkpointing --optimizer_type AdamW8bit"), "gradient_checkpointing = true"
    )
    assert found.how == "--train_batch_size 1 --optimizer_type AdamW8bit"
    text = 'train_batch_size = 1, gradient_checkpointing: true, optimizer_type = "AdamW8bit"'
    assert left_to_do(way("--train_batch_size 1 --gradient_checkpointing --optimizer_type AdamW8bit"), text) is None


def test_a_setting_behind_a_remark_is_not_in_use():
    assert left_to_do(way("--blocks_to_swap 20"), "#blocks_to_swap = 20") is not None
    assert left_to_do(way("--blocks_to_swap 20"), "blocks_to_swap = 20").how == "--blocks_to_swap 40"


def test_shared_memory_outside_a_container_is_the_machines():
    text = "unexpected bus error encountered in worker, insufficient shared memory (shm). I do {} docker"
    assert "remount" in explain(text.format("not use")).remedies[0].how
    assert "--shm-size" in explain(text.format("use")).remedies[0].how


def test_a_card_that_stays_full_is_held_by_an_earlier_run():
    diagnosis = explain(
        "When training has ended the GPU memory remains occupied, and the next run is out of memory. Any idea?"
    )
    assert diagnosis.cause.name == CauseName.OTHER_PROCESS and "fuser" in diagnosis.remedies[0].how


def test_neighbours_are_not_all_pairs():
    diagnosis = explain("I get a MemoryError: DBSCAN(eps=0.3).fit(x), and my RAM quickly climbs up")
    assert diagnosis.cause.name != CauseName.LEAK and "radius_neighbors_graph" in diagnosis.remedies[0].how


def test_a_kill_between_quotes_is_read():
    for text in ('I got this message -> "Killed". What is it?', "blk.35.ffn_norm.weight\nKilled`\nWhat does it mean?"):
        assert explain(text).cause.name == CauseName.KILLED


def test_a_picture_that_is_too_large_becomes_smaller():
    text = "Is there any way to solve cuda out of memory problem when input image is large?"
    assert "tiles" in explain(text).remedies[0].how


def test_a_process_that_would_not_fit_beside_this_one_is_this_one():
    text = (
        "CUDA out of memory. Tried to allocate 8.46 GiB. GPU 0 has a total capacity of 139.72 GiB of which 3.02 GiB is free. "
        "Process 3373672 has 136.69 GiB memory in use. Of the allocated memory 119.21 GiB is allocated by PyTorch, and 14.04 GiB "
        "is reserved by PyTorch but unallocated."
    )
    diagnosis = explain(text)
    assert diagnosis.cause.name == CauseName.TRUE_NEED and "3373672" not in diagnosis.remedies[0].how


def test_a_call_that_the_text_lacks_is_not_in_use():
    text = "torch_geometric: loader = DataLoader([data], batch_size=16) causes an OOM error on my GPU"
    assert "NeighborLoader" in explain(text).remedies[0].how


def test_a_limit_of_nothing_is_raised_to_something():
    text = "PHP Fatal error:  Allowed memory size of 262144 bytes exhausted (tried to allocate 65536 bytes)"
    assert explain(text).remedies[0].how.startswith("memory_limit = 1024M")


def test_gradles_pools_are_told_apart():
    heap = explain("Execution failed for task ':app:merge'.\n> A failure occurred\n   > Java heap space")
    pool = explain(
        "The Daemon will expire after the build after running out of JVM Metaspace. See org.gradle.jvmargs (gradle)"
    )
    assert "heap is full" in heap.cause.text and "beside its heap" in pool.cause.text


def test_data_that_does_not_fit_into_ram_is_a_story():
    diagnosis = explain("I started training the agent. On my machine the script exits after the RAM is full. Any idea?")
    assert diagnosis.failure.device == "cpu" and "buffer" in diagnosis.remedies[0].name
    assert explain("Any tips when my replay buffer won't fit into memory?").failure is not None


def test_pictures_in_one_array_are_read_by_batches():
    text = "    return np.array([np.array(Image.open(path + img)) for img in names])\nMemoryError"
    assert "batch" in explain(text).remedies[0].name
