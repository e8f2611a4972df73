"""Smaller models: `shrink` measures on the user's data what each method saves and costs, and takes the cheapest set."""
