"""Runs the tasks of a pass inside a budget of bytes: a pool that blocks, threads that take tiles in order, events
out."""
