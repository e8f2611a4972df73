"""The functions of the namespace `outsize.array`, one module a subject; what `__all__` of a module names is public there."""
