"""Compiled steps: what torch's compiler makes of them, followed on tensors without contents."""
