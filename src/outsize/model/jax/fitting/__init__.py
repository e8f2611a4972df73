"""Fits a step of JAX: learn how its loss adds up, search a choice, describe the plan, run it."""
