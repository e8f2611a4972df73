"""CUDA memory snapshots: read without running anything, summed up, compared, replayed under other settings."""

from outsize.failure.snapshot.explain import explain_path as explain_path
from outsize.failure.snapshot.explain import explain_snapshot as explain_snapshot
