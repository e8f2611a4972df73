"""Moves blocks between host memory and a device."""
