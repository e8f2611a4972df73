"""Says what a training or inference step will take before it runs (`estimation`), and runs it inside a budget
(`fitting`)."""
