"""Chooses the remedies whose step stays inside the budget."""
