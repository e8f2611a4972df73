"""The drawings: each noun as one rich renderable, which is its text."""
