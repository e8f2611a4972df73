"""The functions of `outsize.array`, by subject, and the lazy array they make."""
