"""Numbers out to what people have: loggers (Weights & Biases, MLflow), TensorBoard, Prometheus, Perfetto.

Each file is one way out. What is said of a sample stands once, in `numbers.py`. Knows only `core` and the pages' timelines.
"""
