"""fit under torchrun: a model that DDP repeats or `fully_shard` spreads, one plan on all ranks, and none that waits for ever."""
