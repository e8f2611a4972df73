"""From a graph to passes that fit the budget: grouping, tiles, and where results stay."""
