"""What a trace knows of operators: the kernels that the device would choose, their results, and values that a step reads."""
