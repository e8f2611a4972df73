"""The values that all rooms exchange (nouns), with their units and errors; standard library only."""
