"""Runs what was planned: into files, into memory, into open stores."""
