"""Arrays larger than memory: graph -> plan -> run, inside a budget of bytes."""
