"""Where arrays live: files and memory, each behind the two small interfaces of `base`."""
