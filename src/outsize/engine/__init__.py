"""Runs the tasks of a pass inside a budget of bytes: a pool of buffers, threads that take tiles in order, pinned
memory."""
