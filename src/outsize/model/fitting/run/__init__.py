"""Runs a step as its plan says."""
