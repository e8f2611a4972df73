"""What computes on blocks: fused programs, accumulators, ranks, products, copies."""
