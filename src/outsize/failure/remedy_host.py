"""Remedies for a host: limits, shared memory, and holding less."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.core.failure import Remedy
from outsize.core.noun import Known
from outsize.failure.case import ROUNDING, Case, make_remedy


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
        "docker": ("raise the container's limit", f"docker run --memory={mib}m ..."),
        "lambda": ("raise the function's memory", f"aws lambda update-function-configuration --memory-size {mib} ..."),
        "cloud": ("raise the service's memory", f"gcloud run deploy --memory={mib}Mi ..."),
        "heroku": ("take a larger dyno", "heroku ps:resize web=performance-l"),
        "matlab": ("allow larger arrays", "Settings > MATLAB > Workspace > Maximum array size"),
        "duckdb": (
            "raise DuckDB's limit, and let it spill",
            f"SET memory_limit = '{mib}MiB'; SET temp_directory = '/scratch';",
        ),
        "clickhouse": ("raise the query's limit", f"SET max_memory_usage = {int(mib) << 20}"),
        "elasticsearch": ("raise the heap, of which the limit is a share", "ES_JAVA_OPTS='-Xms8g -Xmx8g'"),
        "php": ("raise PHP's limit", f"memory_limit = {mib}M   # php.ini"),
        "mongodb": ("let the stage spill", "db.c.aggregate([...], {allowDiskUse: true})"),
        "trino": (
            "raise the query's limit",
            "query.max-memory-per-node   # config.properties; or let it spill: spill-enabled=true",
        ),
        "datafusion": ("let it spill", "RuntimeEnvBuilder().with_disk_manager_os().with_fair_spill_pool(bytes)"),
        "bigquery": ("less at once", "drop ORDER BY and wide GROUP BY over everything, or cut the query in parts"),
    }
    if failure.framework == "openvino":  # the driver's largest buffer, which nobody raises
        return
    name, how = lines.get(
        failure.framework,
        ("raise the container's limit", f"docker run --memory={mib}m ...   # systemd: MemoryMax={mib}M"),
    )
    if limit is None and failure.framework not in lines and not case.extra("anon_rss_bytes"):
        return
    gives = None if want is None or limit is None else want * 2**20 - limit
    yield make_remedy(name, gives, how, "memory that others on the machine then do not have")


def lift_ulimit(case: Case) -> Iterator[Remedy]:
    """`ulimit -v` counts address space, not memory."""
    limit = case.biting
    if limit is not None and limit.name.startswith("ulimit"):
        gives = None if case.reading is None else (case.reading.host.total or 0) - limit.bytes
        yield make_remedy(
            "lift the limit on address space",
            gives,
            f"{limit.name.replace('ulimit', 'ulimit')} unlimited   # in the shell or job script",
            "a runaway process is then stopped by the machine only",
            known=Known.EXACT,
        )


def more_shm(case: Case) -> Iterator[Remedy]:
    """Room for batches in flight."""
    shm = case.reading.shm if case.reading else None
    now = shm.total if shm is not None and shm.total is not None else 64 * 2**20
    yield make_remedy(
        "give the container shared memory",
        8 * 2**30 - now if now < 8 * 2**30 else None,
        "docker run --shm-size=8g ...   # Kubernetes: emptyDir, medium: Memory",
        "counts as RAM of the container",
    )
    yield make_remedy(
        "fewer batches in flight",
        None,
        "DataLoader(..., num_workers=2, prefetch_factor=1)   # workers x prefetch_factor batches live there",
        "slower loading",
    )
    yield make_remedy(
        "no workers: no shared memory at all",
        None,
        "DataLoader(..., num_workers=0)",
        "loading no longer overlaps the work",
    )


def less_in_ram(case: Case) -> Iterator[Remedy]:
    """A process that holds too much of the host."""
    if case.failure.framework in {"pytorch"} and case.failure.process == "DataLoader worker":
        yield make_remedy(
            "fewer workers, and arrays instead of lists of objects in the Dataset",
            None,
            "DataLoader(..., num_workers=2)   # each worker touches, and so copies, a Python list of the parent",
            "slower loading",
        )
    if case.failure.framework == "ray":
        yield make_remedy(
            "fewer tasks at once", None, "@ray.remote(num_cpus=4, memory=8 * 2**30)", "less runs in parallel"
        )
    if case.failure.framework in {"hdf5", "netcdf"}:
        yield make_remedy(
            "smaller chunks: a whole one is held to read a part of it",
            None,
            "h5repack -l NAME:CHUNK=64x1024 x.h5 y.h5   # h5dump -pH x.h5 shows what they are",
            "the file is written once more",
        )
    if case.failure.framework == "dask":
        yield make_remedy(
            "smaller chunks, fewer at once",
            None,
            'x.rechunk("64MiB"); LocalCluster(threads_per_worker=1)',
            "more tasks",
        )
    if case.growth is None and case.format != "dead child":
        yield make_remedy(
            "see who grows, with the line",
            None,
            "outsize run your_script.py   # peak, timeline and the growing line",
            "under 1 % of time",
        )
    if case.spec is None or case.spec.bytes < 2**26:
        yield make_remedy(
            "stream large arrays instead of holding them",
            None,
            'outsize.open("x.npy")   # then .save("y.zarr", budget="2GiB")',
            "time to read and write the disk",
            ROUNDING,
        )
