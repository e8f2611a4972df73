"""Training scripts as they are: each runs in a process of its own, on tensors without contents, for a few of its steps."""
