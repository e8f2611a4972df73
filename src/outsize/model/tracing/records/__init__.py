"""What a trace writes down: every storage with its birth, its end and its owner, and what an allocator makes of that."""
