"""What is known of each framework, in one table: a row a framework, found by the name that `Failure.framework` has.

A row says how the framework is written, which device it means where a message names none, which of its limits can be
raised and where, how it splits and casts, and the advice that belongs to it alone. Rules of causes and remedies ask the
row, so that a new framework is one row here and its wordings in `message/`.
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.core.failure import CauseName, Exactness

BITWISE, ROUNDING, APPROXIMATE = Exactness.BITWISE, Exactness.ROUNDING, Exactness.APPROXIMATE

NEED, FULL, LIMIT, OTHERS = CauseName.TRUE_NEED, CauseName.ALREADY_FULL, CauseName.LIMIT, CauseName.OTHER_PROCESS
_HOST_CAUSES = (NEED, FULL, LIMIT, CauseName.MACHINE, CauseName.KILLED, CauseName.LEAK, CauseName.LARGER_THAN_MACHINE)
_SERVING_CAUSES = (NEED, OTHERS, CauseName.LARGER_THAN_DEVICE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A way out that one framework has."""

    name: str
    """What to do."""
    how: str
    """The line or setting."""
    causes: tuple[CauseName, ...]
    """Causes it helps against."""
    costs: str = "nothing"
    """What it costs."""
    exactness: Exactness = BITWISE
    """What it does to results."""
    gives: str = ""
    """Name of the number of a `Case` that says how many bytes it gives back; empty where that is not known."""
    variable: str = ""
    """Environment variable that it sets."""
    done: str = ""
    """Value of the variable that means it is on already; empty where any value does."""
    place: str = ""
    """Kind of device it is for, `cuda` where the message does not say; empty for everywhere."""
    formats: tuple[str, ...] = ()
    """Wordings it is for; empty for all."""
    process: str = ""
    """Name of the process it is for; empty for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """What is known of one framework; everything may be left open."""

    title: str = ""
    """Its name as people write it."""
    device: str | None = None
    """Device where its messages do not name one."""
    host: bool = False
    """True where it names no device and uses none but RAM."""
    accelerated: bool = False
    """True where it computes on a device unless a message says otherwise."""
    python: bool = True
    """False where no Python program can be behind it, so that nothing of Outsize can run it."""
    killer: str = ""
    """Whose limit it is that kills, and where that is set: for schedulers and containers."""
    setting: str = ""
    """What holds the limit that the program keeps itself to."""
    raising: tuple[str, str] | None = None
    """How its limit is raised: what to do, and the line, in which {mib} and {bytes} stand for the new limit."""
    split: str = "for part in np.array_split(x, {pieces}, axis={axis}): ..."
    """How an array is worked on in pieces."""
    cast: str = "np.empty(shape, dtype=np.{dtype})   # at creation: x.astype() holds both"
    """How an array becomes smaller."""
    advice: tuple[Advice, ...] = ()
    """What it alone offers."""


_SMALLER_CACHE = (
    Advice(
        name="a smaller KV cache",
        how="-c 4096 --cache-type-k q8_0 --cache-type-v q8_0",
        costs="shorter context, slightly other logits",
        exactness=APPROXIMATE,
        causes=_SERVING_CAUSES,
    ),
    Advice(
        name="keep some layers in RAM", how="-ngl 20   # lower until it fits", costs="slower", causes=_SERVING_CAUSES
    ),
)
_SMALLER_CHUNKS = (
    Advice(
        name="smaller chunks: a whole one is held to read a part of it",
        how="h5repack -l NAME:CHUNK=64x1024 x.h5 y.h5   # h5dump -pH x.h5 shows what they are",
        costs="the file is written once more",
        causes=_HOST_CAUSES,
    ),
)
_LIBRARY_ROOM = Advice(
    name="leave room outside PyTorch for library handles",
    how="torch.cuda.set_per_process_memory_fraction(0.95)",
    costs="5 % of the card",
    formats=("library", "library-host", "nccl"),
    causes=(NEED,),
)

_HOST_PROGRAMS = ("imagemagick", "gromacs", "r", "rust", "javascript", "redis", "fortran", "perl", "mysql")
_WHO_HOLDS = Advice(
    name="see what holds the card before the program is blamed",
    how="nvidia-smi   # other processes, and what this one holds before the call",
    causes=(NEED, FULL),
)
_SMALLER_BATCH = Advice(
    name="a smaller batch",
    how="batch_size = 16   # half of yours",
    costs="more steps",
    exactness=ROUNDING,
    causes=(NEED, FULL, CauseName.LARGER_THAN_DEVICE),
)
_CUDA_LIBRARIES = (
    "thrust", "theano", "xgboost", "catboost", "faiss", "numba", "exllama", "nvdec", "cuda",
)  # fmt: skip

FRAMEWORKS: dict[str, Framework] = {
    "pytorch": Framework(
        title="PyTorch",
        split="for part in x.split({length}, dim={axis}): ...",
        cast="x = x.to(torch.{dtype})",
        advice=(
            Advice(
                name="lift PyTorch's watermark",
                how="PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 python train.py",
                costs="macOS may swap, or stop the machine",
                variable="PYTORCH_MPS_HIGH_WATERMARK_RATIO",
                done="0.0",
                place="mps",
                causes=(NEED, CauseName.OTHER_ALLOCATIONS),
            ),
            _LIBRARY_ROOM,
            Advice(
                name="fewer workers, and arrays instead of lists of objects in the Dataset",
                how="DataLoader(..., num_workers=2)   # each worker touches, and so copies, a Python list of the parent",
                costs="slower loading",
                process="DataLoader worker",
                causes=_HOST_CAUSES,
            ),
        ),
    ),
    "nccl": Framework(title="NCCL", device="cuda", advice=(_LIBRARY_ROOM,)),
    "tensorflow": Framework(
        title="TensorFlow",
        accelerated=True,
        split="for start in range(0, {axis_length}, {length}):\n    part = x[{slices}]",
        cast="tf.cast(x, tf.{dtype})   # keras: mixed_precision.set_global_policy('mixed_float16')",
        advice=(
            Advice(
                name="let CUDA's own pool serve TensorFlow",
                how="TF_GPU_ALLOCATOR=cuda_malloc_async python train.py",
                gives="unused",
                variable="TF_GPU_ALLOCATOR",
                causes=(CauseName.FRAGMENTATION,),
            ),
            Advice(
                name="halve the batch: activations are half as large, weights and their state stay",
                how="model.fit(x, y, batch_size=16)   # half of yours",
                costs="noisier gradients, or the time of two passes",
                exactness=APPROXIMATE,
                gives="half_of_batch",
                causes=(NEED, FULL),
            ),
            Advice(
                name="let TensorFlow, this one and any other on the card, take memory as it needs it",
                how="TF_FORCE_GPU_ALLOW_GROWTH=true python train.py",
                variable="TF_FORCE_GPU_ALLOW_GROWTH",
                done="true",
                place="cuda",
                causes=(NEED, OTHERS, CauseName.PREALLOCATION),
            ),
        ),
    ),
    "jax": Framework(
        title="JAX",
        accelerated=True,
        advice=(
            Advice(
                name="let JAX have more than its 75 % of the card",
                how="XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python train.py",
                costs="leaves less to others",
                variable="XLA_PYTHON_CLIENT_MEM_FRACTION",
                place="cuda",
                causes=(FULL, NEED),
            ),
            Advice(
                name="recompute instead of keeping",
                how="loss = jax.checkpoint(loss)   # and donate_argnums for the old state",
                costs="about a third more time",
                exactness=ROUNDING,
                causes=(FULL, NEED, CauseName.LARGER_THAN_LIMIT),
            ),
            Advice(
                name="a smaller batch, accumulated over several steps",
                how="optax.MultiSteps(optimizer, every_k_schedule=2)   # and half the batch",
                costs="the time of two passes",
                exactness=ROUNDING,
                causes=(FULL, NEED, CauseName.LARGER_THAN_LIMIT),
            ),
        ),
    ),
    "numpy": Framework(title="NumPy", device="cpu"),
    "pandas": Framework(title="pandas", host=True),
    "arrow": Framework(device="cpu"),
    "hdf5": Framework(device="cpu", advice=_SMALLER_CHUNKS),
    "netcdf": Framework(device="cpu", advice=_SMALLER_CHUNKS),
    **dict.fromkeys(_HOST_PROGRAMS, Framework(device="cpu", python=False)),
    **dict.fromkeys(("gdal", "petsc", "macos"), Framework(device="cpu")),
    **dict.fromkeys(("ruby", "dotnet", "stata", "erlang", "compiler"), Framework(python=False)),
    **dict.fromkeys(_CUDA_LIBRARIES, Framework(device="cuda", advice=(_WHO_HOLDS,))),
    "cupy": Framework(
        device="cuda",
        advice=(
            Advice(
                name="let the card's memory overflow into RAM",
                how="cupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc)",
                costs="slower once it overflows",
                causes=(NEED, FULL),
            ),
            _WHO_HOLDS,
        ),
    ),
    "rmm": Framework(
        device="cuda",
        advice=(
            Advice(
                name="let the card's memory overflow into RAM",
                how="rmm.reinitialize(managed_memory=True)   # cudf: CUDF_SPILL=on",
                costs="slower once it overflows",
                causes=(NEED, FULL),
            ),
            _WHO_HOLDS,
        ),
    ),
    "openblas": Framework(
        host=True,
        advice=(
            Advice(
                name="fewer threads: each has buffers of its own",
                how="OPENBLAS_NUM_THREADS=1 python script.py",
                costs="slower products of matrices",
                variable="OPENBLAS_NUM_THREADS",
                done="1",
                causes=_HOST_CAUSES,
            ),
        ),
    ),
    "mxnet": Framework(device="cuda", advice=(_SMALLER_BATCH, _WHO_HOLDS)),
    "paddle": Framework(accelerated=True, advice=(_SMALLER_BATCH, _WHO_HOLDS)),
    "go": Framework(host=True, python=False),
    "mlx": Framework(device="metal"),
    "metal": Framework(device="metal", advice=_SMALLER_CACHE),
    "ggml": Framework(accelerated=True, title="llama.cpp", advice=_SMALLER_CACHE),
    "ollama": Framework(device="cpu", advice=_SMALLER_CACHE),
    "vllm": Framework(accelerated=True, title="vLLM"),
    "sglang": Framework(
        accelerated=True,
        advice=(
            Advice(
                name="give the weights and the KV cache more of the card",
                how="--mem-fraction-static 0.9",
                costs="less is left for activations",
                causes=_SERVING_CAUSES,
            ),
        ),
    ),
    "tensorrt": Framework(
        device="cuda",
        advice=(
            Advice(
                name="less workspace",
                how="trtexec --memPoolSize=workspace:1024",
                costs="perhaps slower tactics",
                exactness=ROUNDING,
                causes=_SERVING_CAUSES,
            ),
        ),
    ),
    "onnxruntime": Framework(
        accelerated=True,
        advice=(
            Advice(
                name="let the arena grow only as asked",
                how='("CUDAExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})',
                causes=_SERVING_CAUSES,
            ),
        ),
    ),
    **dict.fromkeys(("c++", "python", "julia", "windows", "notebook"), Framework(host=True)),
    "postgres": Framework(device="cpu", host=True, python=False),
    "java": Framework(
        host=True,
        python=False,
        raising=("raise the heap", "java -Xmx8g ...   # Spark: --driver-memory 8g --executor-memory 8g"),
    ),
    "node": Framework(host=True, python=False, raising=("raise the heap", "NODE_OPTIONS=--max-old-space-size=8192")),
    "duckdb": Framework(
        device="cpu",
        setting="memory_limit",
        raising=(
            "raise DuckDB's limit, and let it spill",
            "SET memory_limit = '{mib}MiB'; SET temp_directory = '/scratch';",
        ),
    ),
    "clickhouse": Framework(
        host=True,
        python=False,
        setting="max_memory_usage",
        raising=("raise the query's limit", "SET max_memory_usage = {bytes}"),
    ),
    "elasticsearch": Framework(
        host=True,
        python=False,
        setting="indices.breaker.total.limit",
        raising=("raise the heap, of which the limit is a share", "ES_JAVA_OPTS='-Xms8g -Xmx8g'"),
    ),
    "php": Framework(
        host=True,
        python=False,
        setting="memory_limit",
        raising=("raise PHP's limit", "memory_limit = {mib}M   # php.ini"),
    ),
    "mongodb": Framework(
        host=True,
        python=False,
        setting="100 MB a stage without allowDiskUse",
        raising=("let the stage spill", "db.c.aggregate([...], {{allowDiskUse: true}})"),
    ),
    "trino": Framework(
        host=True,
        python=False,
        setting="query.max-memory",
        raising=(
            "raise the query's limit",
            "query.max-memory-per-node   # config.properties; or let it spill: spill-enabled=true",
        ),
    ),
    "datafusion": Framework(
        device="cpu",
        setting="the session's memory pool",
        raising=("let it spill", "RuntimeEnvBuilder().with_disk_manager_os().with_fair_spill_pool(bytes)"),
    ),
    "bigquery": Framework(
        host=True,
        python=False,
        setting="the memory of a query's slots",
        raising=("less at once", "drop ORDER BY and wide GROUP BY over everything, or cut the query in parts"),
    ),
    "matlab": Framework(
        host=True, python=False, raising=("allow larger arrays", "Settings > MATLAB > Workspace > Maximum array size")
    ),
    "kubernetes": Framework(
        killer="pod (resources.limits.memory)",
        raising=("raise the pod's limit", "resources: {{limits: {{memory: {mib}Mi}}}}"),
    ),
    "slurm": Framework(
        killer="Slurm job (--mem)",
        raising=(
            "ask Slurm for more",
            "sbatch --mem={mib}M job.sh   # sacct -j JOBID --format=MaxRSS says what it took",
        ),
    ),
    "pbs": Framework(killer="PBS job", raising=("ask PBS for more", "qsub -l mem={mib}mb")),
    "lsf": Framework(killer="LSF job", raising=("ask LSF for more", "bsub -M {mib}")),
    "dask": Framework(
        killer="Dask worker (memory_limit)",
        raising=("give each worker more", 'LocalCluster(n_workers=2, memory_limit="{mib}MiB")'),
        advice=(
            Advice(
                name="smaller chunks, fewer at once",
                how='x.rechunk("64MiB"); LocalCluster(threads_per_worker=1)',
                costs="more tasks",
                causes=_HOST_CAUSES,
            ),
        ),
    ),
    "spark": Framework(
        killer="executor's container (executor memory + overhead)",
        raising=("give executors more beside the heap", "--conf spark.executor.memoryOverhead={mib}m"),
    ),
    "ray": Framework(
        advice=(
            Advice(
                name="fewer tasks at once",
                how="@ray.remote(num_cpus=4, memory=8 * 2**30)",
                costs="less runs in parallel",
                causes=_HOST_CAUSES,
            ),
        ),
    ),
    "docker": Framework(
        killer="container (docker run --memory)",
        raising=("raise the container's limit", "docker run --memory={mib}m ..."),
    ),
    "lambda": Framework(
        host=True,
        killer="Lambda function (memory size)",
        raising=("raise the function's memory", "aws lambda update-function-configuration --memory-size {mib} ..."),
    ),
    "cloud": Framework(
        killer="cloud service", raising=("raise the service's memory", "gcloud run deploy --memory={mib}Mi ...")
    ),
    "heroku": Framework(killer="dyno", raising=("take a larger dyno", "heroku ps:resize web=performance-l")),
}
"""Name -> row. A framework without a row has nothing of its own."""

CONTAINER = ("raise the container's limit", "docker run --memory={mib}m ...   # systemd: MemoryMax={mib}M")
"""How a limit is raised that no framework set."""

ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables that configure PyTorch's allocator."""
VARIABLES = (
    *ALLOCATOR_SETTINGS,
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    *(advice.variable for row in FRAMEWORKS.values() for advice in row.advice if advice.variable),
)
"""Environment variables that advice depends on."""

_NOTHING = Framework()


def framework(name: str) -> Framework:
    """What is known of a framework."""
    return FRAMEWORKS.get(name, _NOTHING)
