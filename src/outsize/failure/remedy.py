"""What would mend it, ranked by the bytes each gives back.

In: a `Case` and its causes. Out: remedies with predicted bytes and the exact line to use. One already on is never offered,
nor one that cannot help: `empty_cache()` (the allocator has emptied its cache before it raised), expandable segments where
the unused memory is smaller than what is missing, pruning masks (they remove no byte), `file_system` sharing for a full
`/dev/shm` (it lives there too). Each maker below is one remedy; `REMEDIES` says which cause asks for which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from outsize.core.failure import Cause, Exactness, Remedy
from outsize.core.noun import Known
from outsize.core.spec import Spec
from outsize.core.units import format_bytes as said
from outsize.failure.case import Case, pair_of_long_axes

Maker = Callable[[Case], Iterator[Remedy]]

_BITWISE, _ROUNDING, _APPROXIMATE = Exactness.BITWISE, Exactness.ROUNDING, Exactness.APPROXIMATE
_NARROWER = {"float64": "float32", "complex128": "complex64", "int64": "int32", "float32": "float16", "uint64": "uint32",
             "complex64": "complex32", "int32": "int16"}  # fmt: skip


def _remedy(
    name: str, saves: int | None, how: str, costs: str = "nothing", exactness: Exactness = _BITWISE,
    known: Known = Known.ESTIMATE,
) -> Remedy:  # fmt: skip
    return Remedy(name=name, saves=saves, known=known, costs=costs, exactness=exactness, how=how)


def expandable(case: Case) -> Iterator[Remedy]:
    """Segments that grow instead of many that do not fit together."""
    if case.expandable or not case.on_torch_gpu or not case.slack or case.gap is None or case.slack < case.gap:
        return
    name = "PYTORCH_HIP_ALLOC_CONF" if (case.failure.device or "").startswith("hip") else "PYTORCH_CUDA_ALLOC_CONF"
    yield _remedy("let the allocator's segments grow", case.slack, f"{name}=expandable_segments:True python train.py",
                  "nothing; set it before the first use of the device", known=Known.BOUND)  # fmt: skip


def steady_sizes(case: Case) -> Iterator[Remedy]:
    """What cuts the cache to pieces are sizes that change."""
    if case.on_torch_gpu and case.slack:
        yield _remedy("pad inputs to a few fixed sizes, and make the largest first", case.slack,
                      "DataLoader(..., collate_fn=pad_to_a_multiple_of_512)   # and run one longest batch first",
                      "some padding", _ROUNDING)  # fmt: skip


def tf_async(case: Case) -> Iterator[Remedy]:
    """CUDA's own pool under TensorFlow."""
    if case.failure.framework == "tensorflow" and "TF_GPU_ALLOCATOR" not in case.settings:
        unused = _minus(case.failure.limit_bytes, case.failure.allocated_bytes)
        yield _remedy("let CUDA's own pool serve TensorFlow", unused, "TF_GPU_ALLOCATOR=cuda_malloc_async python "
            "train.py",
                      known=Known.BOUND)  # fmt: skip


def stop_others(case: Case) -> Iterator[Remedy]:
    """End them, or go to another card."""
    for pid, size in case.strangers[:3]:
        yield _remedy(
            f"end process {pid} if it is yours and no longer needed",
            size,
            f"kill {pid}",
            "that process",
            known=Known.EXACT,
        )
    if not case.strangers:
        yield _remedy("end what else is on the card", case.others, "nvidia-smi  # then: kill PID", "those processes")
    if (case.failure.device or "").startswith(("cuda", "hip")):
        index = (case.failure.device or "").partition(":")[2]
        other = "1" if index in ("", "0") else "0"
        variable = "HIP_VISIBLE_DEVICES" if (case.failure.device or "").startswith("hip") else "CUDA_VISIBLE_DEVICES"
        yield _remedy("use a card that is free", None, f"{variable}={other} python train.py", "another card")


def raise_fraction(case: Case) -> Iterator[Remedy]:
    """The limit the program set itself."""
    failure = case.failure
    limit, total, held, need = failure.limit_bytes, failure.total_bytes, case.held, case.need
    if limit is None or not total or held is None or need is None or held + need > total:
        return
    fraction = min(1.0, (held + need) / total * 1.02)
    can = min(total, held + (failure.free_bytes if failure.free_bytes is not None else total)) - limit
    if can > 0:
        yield _remedy("raise the memory fraction", can, f"torch.cuda.set_per_process_memory_fraction({fraction:.3f})",
                      "leaves less of the card to others", known=Known.EXACT)  # fmt: skip


def fewer_graphs(case: Case) -> Iterator[Remedy]:
    """What graphs captured stays."""
    yield _remedy("run without CUDA graphs, or capture fewer sizes into one "
                  "shared pool", case.extra("private_pool_bytes"),
                  'torch.compile(model, mode="default")  # not "reduce-overhead"; vLLM: --enforce-eager',
                  "launch overhead of small kernels", known=Known.BOUND)  # fmt: skip


def fit_training(case: Case) -> Iterator[Remedy]:
    """The batch in slices, then recomputation: exact, and any amount."""
    if not case.on_torch_gpu and case.failure.device not in {"mps"}:
        return
    room = case.failure.limit_bytes or case.failure.total_bytes
    budget = f', budget="{room * 9 // 10 // 2**20}MiB"' if room else ""
    missing = max(0, (case.gap or 0) - (case.slack or 0)) or None
    short = f"  # {said(missing)} are missing" if missing else ""
    yield _remedy("training: slice the batch and recompute activations inside a budget", None,
                  f"fitted = outsize.fit(model, loss, optimizer, batch{budget}){short}",
                  "some time for recomputation", _ROUNDING)  # fmt: skip
    yield _remedy("evaluation: do not record gradients", None, "with torch.inference_mode(): output = model(batch)")
    if case.need is not None and case.need >= 2**28:
        yield _remedy("halve the batch and accumulate two "
                      "of them", case.need // 2 if case.need // 2 >= (missing or 0) else None,
                      "(loss / 2).backward()  # twice, then optimizer.step(): same effective batch",
                      "BatchNorm sees half batches", _ROUNDING)  # fmt: skip
    yield _remedy("keep the optimizer's state in 8 bits", None, "torchao.optim.AdamW8bit(model.parameters(), lr=1e-4)",
                  "state in lower precision", _APPROXIMATE)  # fmt: skip


def smaller_tensor(case: Case) -> Iterator[Remedy]:
    """What the shape itself allows, to the byte."""
    spec = case.spec
    if spec is None or spec.bytes < 2**26:
        return
    yield from _stream(case, spec)
    yield from _in_pieces(case, spec)
    narrow = _NARROWER.get(spec.dtype.name)
    if (
        narrow
        and _fits(case, Spec.of(spec.shape, narrow))
        and not (narrow == "complex32" and case.failure.framework == "numpy")
    ):
        after = Spec.of(spec.shape, narrow)
        integer = spec.dtype.kind in ("int", "uint")
        yield _remedy(f"{narrow} instead of {spec.dtype.name}: {said(spec.bytes)} -> "
                      f"{said(after.bytes)}", spec.bytes - after.bytes,
                      _cast(case, narrow), "values must fit" if integer else "fewer digits",
                      _BITWISE if integer else _APPROXIMATE, Known.EXACT)  # fmt: skip
    if spec.dtype.name == "float64" and _fits(case, Spec.of(spec.shape, "float16")):
        after = Spec.of(spec.shape, "float16")
        yield _remedy(f"float16 instead of {spec.dtype.name}: {said(spec.bytes)} -> "
                      f"{said(after.bytes)}", spec.bytes - after.bytes,
                      _cast(case, "float16"), "3 digits, largest value 65504", _APPROXIMATE, Known.EXACT)  # fmt: skip


def _stream(case: Case, spec: Spec) -> Iterator[Remedy]:
    """Through a budget of RAM, from and to disk."""
    if not case.on_host and case.failure.framework not in {"numpy", "tensorflow", "pytorch"}:
        return
    room = case.reading.host.available if case.reading else None
    disk = case.reading.disk.available if case.reading else None
    if disk is not None and spec.bytes > disk:
        return
    budget = min(2**30, spec.bytes // 4) if room is None else max(2**26, min(room // 2, 2**30, spec.bytes // 4))
    mib = budget // 2**20
    yield _remedy(
        f"stream it: {said(spec.bytes)} on disk, {mib} MiB in RAM", spec.bytes - mib * 2**20,
        f'x = outsize.open("x.npy")                       # nothing is loaded\ny = (x - x.mean(axis=0)) / '
        f'x.std(axis=0)        # any array expression\n'
        f'y.save("y.zarr", budget="{mib}MiB")',
        "time to read and write the disk", _ROUNDING, Known.EXACT,
    )  # fmt: skip


def _room(case: Case) -> int | None:
    """Bytes that can be had where the tensor was wanted, None if unknown."""
    if case.on_host:
        return None if case.reading is None else case.reading.host.available
    return case.failure.limit_bytes or case.failure.total_bytes


def _fits(case: Case, spec: Spec) -> bool:
    """False where the smaller tensor would not go either."""
    room = _room(case)
    return room is None or spec.bytes <= room


def _in_pieces(case: Case, spec: Spec) -> Iterator[Remedy]:
    """Half of an axis at a time, or as many pieces as it takes."""
    axis, length = max(enumerate(spec.shape), key=lambda pair: (pair[1] > 1 and pair[0] == 0, pair[1]))
    room = _room(case)
    pieces = 2 if not room else max(2, -(-2 * spec.bytes // room))
    if length < pieces:
        return
    part = list(spec.shape)
    part[axis] = -(-length // pieces)
    after = Spec.of(part, spec.dtype)
    how = {"tensorflow": f"for start in range(0, {length}, {part[axis]}): part = tf.gather(x, range(start, "
                         f"min(start + {part[axis]}, {length})), axis={axis})",
           "pytorch": f"for part in x.split({part[axis]}, dim={axis}): ..."}  # fmt: skip
    name = "half of" if pieces == 2 else f"1/{pieces} of"
    yield _remedy(f"{name} axis {axis} at a time: {length} -> {part[axis]}", spec.bytes - after.bytes,
                  how.get(case.failure.framework, f"for part in np.array_split(x, {pieces}, axis={axis}): ..."),
                  f"{pieces} passes", known=Known.EXACT)  # fmt: skip


def _cast(case: Case, dtype: str) -> str:
    calls = {"tensorflow": f"tf.cast(x, tf.{dtype})   # keras: mixed_precision.set_global_policy('mixed_float16')",
             "pytorch": f"x = x.to(torch.{dtype})"}  # fmt: skip
    return calls.get(
        case.failure.framework, f"np.empty(shape, dtype=np.{dtype})   # at creation: x.astype() holds both"
    )


def reshape_operands(case: Case) -> Iterator[Remedy]:
    """The matrix nobody wanted."""
    pair = None if case.failure.shape is None else pair_of_long_axes(case.failure.shape)
    if pair is None or case.need is None or pair[0] != pair[1]:
        return
    item = max(1, case.need // (pair[0] * pair[1]))
    yield _remedy("give both operands the same shape", case.need - item * pair[0],
                  "x.ravel() - y.ravel()   # or x - y[:, None]: (n, 1) with (n, 1)", known=Known.EXACT)  # fmt: skip


def pairwise_in_blocks(case: Case) -> Iterator[Remedy]:
    """If every pair was meant."""
    shape = case.failure.shape
    if shape is None or case.need is None or pair_of_long_axes(shape) is None:
        return
    rows = max(1, (2**28 * shape[0]) // case.need)
    yield _remedy(f"if every pair was meant: {rows:,} rows at a time", case.need - case.need * rows // shape[0],
                  f"for i in range(0, len(x), {rows}):\n    block = x[i:i + {rows}, None] - y   # use it, keep "
                  f"only the answer",
                  "time", known=Known.EXACT)  # fmt: skip


def raise_limit(case: Case) -> Iterator[Remedy]:
    """More of what the machine has."""
    failure = case.failure
    limit = failure.limit_bytes or (case.biting.bytes if case.biting else None)
    held = case.extra("anon_rss_bytes") or case.extra("usage_bytes") or case.need or limit
    want = None if held is None else (max(held, limit or 0) * 3 // 2 + 2**20 - 1) // 2**20
    mib = f"{want}" if want else "16384"
    lines = {
        "kubernetes": ("raise the pod's limit", f"resources: {{limits: {{memory: {mib}Mi}}}}"),
        "slurm": (
            "ask Slurm for more",
            f"sbatch --mem={mib}M job.sh   # sacct -j JOBID --format=MaxRSS says what it took",
        ),
        "dask": ("give each worker more", f'LocalCluster(n_workers=2, memory_limit="{mib}MiB")'),
        "spark": ("give executors more beside the heap", f"--conf spark.executor.memoryOverhead={mib}m"),
        "java": ("raise the heap", "java -Xmx8g ...   # Spark: --driver-memory 8g --executor-memory 8g"),
        "node": ("raise the heap", "NODE_OPTIONS=--max-old-space-size=8192"),
        "pbs": ("ask PBS for more", f"qsub -l mem={mib}mb"),
        "lsf": ("ask LSF for more", f"bsub -M {mib}"),
    }
    name, how = lines.get(
        failure.framework,
        ("raise the container's limit", f"docker run --memory={mib}m ...   # systemd: MemoryMax={mib}M"),
    )
    if want is None and failure.framework not in lines:
        return
    gives = None if want is None or limit is None else want * 2**20 - limit
    yield _remedy(name, gives, how, "memory that others on the machine then do not have")


def lift_ulimit(case: Case) -> Iterator[Remedy]:
    """`ulimit -v` counts address space, not memory."""
    limit = case.biting
    if limit is not None and limit.name.startswith("ulimit"):
        gives = None if case.reading is None else (case.reading.host.total or 0) - limit.bytes
        yield _remedy("lift the limit on address space", gives, f"{limit.name.replace('ulimit', 'ulimit')} "
            f"unlimited   # in the shell or job script",
                      "a runaway process is then stopped by the machine only", known=Known.EXACT)  # fmt: skip


def more_shm(case: Case) -> Iterator[Remedy]:
    """Room for batches in flight."""
    shm = case.reading.shm if case.reading else None
    now = shm.total if shm is not None and shm.total is not None else 64 * 2**20
    yield _remedy("give the container shared memory", 8 * 2**30 - now if now < 8 * 2**30 else None,
                  "docker run --shm-size=8g ...   # Kubernetes: an emptyDir of medium Memory on /dev/shm",
                  "counts as RAM of the container")  # fmt: skip
    yield _remedy("fewer batches in flight", None, "DataLoader(..., num_workers=2, prefetch_factor=1)   # workers "
        "x prefetch_factor batches live there",
                  "slower loading")  # fmt: skip
    yield _remedy(
        "no workers: no shared memory at all",
        None,
        "DataLoader(..., num_workers=0)",
        "loading no longer overlaps the work",
    )


def less_in_ram(case: Case) -> Iterator[Remedy]:
    """A process that holds too much of the host."""
    if case.failure.framework in {"pytorch"} and case.failure.process == "DataLoader worker":
        yield _remedy("fewer workers, and arrays instead of lists of objects in the Dataset", None,
                      "DataLoader(..., num_workers=2)   # each worker touches, and so copies, a Python list of "
                      "the parent", "slower loading")  # fmt: skip
    if case.failure.framework == "ray":
        yield _remedy("fewer tasks at once", None, "@ray.remote(num_cpus=4, memory=8 * 2**30)", "less runs in parallel")
    if case.failure.framework == "dask":
        yield _remedy(
            "smaller chunks, fewer at once",
            None,
            'x.rechunk("64MiB"); LocalCluster(threads_per_worker=1)',
            "more tasks",
        )
    if case.growth is None and case.format != "dead child":
        yield _remedy(
            "see who grows, with the line",
            None,
            "outsize run your_script.py   # peak, timeline and the growing line",
            "under 1 % of time",
        )
    yield _remedy("stream large arrays instead of holding them", None, 'outsize.open("x.npy")   # then '
        '.save("y.zarr", budget="2GiB")',
                  "time to read and write the disk", _ROUNDING)  # fmt: skip


def growth(case: Case) -> Iterator[Remedy]:
    """TensorFlow and JAX take the card at start."""
    framework, settings = case.failure.framework, case.settings
    if framework == "tensorflow" and settings.get("TF_FORCE_GPU_ALLOW_GROWTH", "").lower() != "true":
        yield _remedy("let TensorFlow take memory as it needs it", None,
                      "TF_FORCE_GPU_ALLOW_GROWTH=true python train.py")  # fmt: skip
    if (
        framework == "jax"
        and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in settings
        and (case.failure.device or "cuda").startswith("cuda")
    ):
        yield _remedy("let JAX have more than its 75 % of the card", None, "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 "
            "python train.py",
                      "leaves less to others")  # fmt: skip
    if framework == "jax":
        yield _remedy("recompute instead of keeping", None, "loss = jax.checkpoint(loss)   # and donate_argnums "
            "for the old state",
                      "about a third more time", _ROUNDING)  # fmt: skip


def watermark(case: Case) -> Iterator[Remedy]:
    """Apple's unified memory."""
    if case.settings.get("PYTORCH_MPS_HIGH_WATERMARK_RATIO") != "0.0":
        yield _remedy("lift PyTorch's watermark", None, "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 python train.py",
                      "macOS may swap, or stop the machine")  # fmt: skip


def serving(case: Case) -> Iterator[Remedy]:
    """vLLM and llama.cpp have their own levers."""
    if case.failure.framework == "vllm":
        length = case.failure.extra.get("max_model_len")
        if length is None and case.need and case.failure.free_bytes and case.failure.extra.get("max_seq_len"):
            length = int(case.failure.extra["max_seq_len"] * case.failure.free_bytes / case.need) // 16 * 16
        yield _remedy("serve shorter requests", _minus(case.need, case.failure.free_bytes), f"--max-model-len "
            f"{length or 8192}", "shorter context",
                      known=Known.BOUND)  # fmt: skip
        yield _remedy(
            "keep the KV cache in 8 bits",
            None if case.need is None else case.need // 2,
            "--kv-cache-dtype fp8",
            "slightly other logits",
            _APPROXIMATE,
        )
        yield _remedy("give vLLM more of the card", None, "--gpu-memory-utilization 0.95", "leaves less to others")
    if case.failure.framework in {"ggml", "metal", "ollama"}:
        yield _remedy(
            "a smaller KV cache",
            None,
            "-c 4096 --cache-type-k q8_0 --cache-type-v q8_0",
            "shorter context, slightly other logits",
            _APPROXIMATE,
        )
        yield _remedy("keep some layers in RAM", None, "-ngl 20   # lower until it fits", "slower")
    if case.failure.framework == "tensorrt":
        yield _remedy(
            "less workspace", None, "trtexec --memPoolSize=workspace:1024", "perhaps slower tactics", _ROUNDING
        )
    if case.failure.framework == "onnxruntime":
        yield _remedy(
            "let the arena grow only as asked",
            None,
            '("CUDAExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})',
        )


def library_handle(case: Case) -> Iterator[Remedy]:
    """cuBLAS and kin allocate outside the framework's cache."""
    if case.format in {"library", "library-host"}:
        yield _remedy("leave room outside PyTorch for library handles", None, "torch.cuda.set_per_process_memory_fraction(0.95)",
                      "5 % of the card")  # fmt: skip


def check_length(case: Case) -> Iterator[Remedy]:
    """A wrapped or corrupt length."""
    yield _remedy(
        "look where the length comes from",
        None,
        "print the shape just before the call; a negative or overflowed int32 product is the usual reason",
    )


REMEDIES: dict[str, tuple[Maker, ...]] = {
    "impossible request": (check_length,),
    "warning only": (),
    "broadcast explosion": (reshape_operands, pairwise_in_blocks),
    "request larger than the device": (smaller_tensor, fit_training, serving),
    "request larger than the machine": (smaller_tensor, less_in_ram),
    "request larger than the limit": (smaller_tensor, raise_fraction, raise_limit),
    "fragmentation": (expandable, steady_sizes, tf_async),
    "memory fraction": (raise_fraction, fit_training),
    "other process": (stop_others, growth, serving),
    "other allocations": (watermark,),
    "CUDA graph pools": (fewer_graphs, fit_training),
    "refused though free": (stop_others,),
    "preallocation": (growth,),
    "shared memory": (more_shm,),
    "limit": (raise_limit, less_in_ram),
    "machine out of memory": (less_in_ram,),
    "address space": (lift_ulimit, smaller_tensor),
    "killed": (less_in_ram,),
    "leak": (less_in_ram,),
    "memory already full": (growth, less_in_ram),
    "true need": (smaller_tensor, expandable, fit_training, watermark, growth, serving, library_handle, less_in_ram),
}
"""Cause -> the remedies worth trying."""

_DEVICE_ONLY = {expandable, steady_sizes, fewer_graphs, fit_training, raise_fraction}
_HOST_ONLY = {less_in_ram, lift_ulimit}


def find_remedies(case: Case, causes: tuple[Cause, ...]) -> tuple[Remedy, ...]:
    """Every remedy that can help, most bytes first; those whose bytes cannot be told keep the order of the table."""
    on_device = not case.on_host and (case.failure.device or "") not in ("", "cpu")
    found: dict[str, Remedy] = {}
    for cause in causes[: 1 if causes[0].name == "broadcast explosion" else 2]:
        for maker in REMEDIES.get(cause.name, ()):
            if (maker in _HOST_ONLY and on_device) or (maker is watermark and case.failure.device != "mps"):
                continue
            if maker in _DEVICE_ONLY and case.on_host:
                continue
            for remedy in maker(case):
                if remedy.saves is None or remedy.saves > 0:
                    found.setdefault(remedy.name, remedy)
    return tuple(sorted(found.values(), key=lambda remedy: -(remedy.saves or 0)))


def _minus(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first - second
