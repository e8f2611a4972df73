"""Foresee a step's memory without the card."""
