"""Rows and batches of an array for training loops."""
