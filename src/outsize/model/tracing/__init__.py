"""What a step does: every storage that comes and goes while it runs on tensors without contents."""
