"""Moves tensors between a device, host memory and files."""
