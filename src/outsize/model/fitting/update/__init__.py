"""The update of parameters: where gradients go, and when, where and how the optimizer steps."""
