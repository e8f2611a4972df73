"""Traces a step on tensors without contents: every storage that is allocated and freed."""
