"""Saved tensors of a forward pass, made again by the operators that made them, whatever code called those."""
