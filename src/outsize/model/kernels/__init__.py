"""What operators take in memory besides their results, on a card and on a CPU."""
