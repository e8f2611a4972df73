"""The nouns every room speaks in, their units and their errors; standard library only."""
