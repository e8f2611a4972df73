"""One file a format: how arrays lie in it, and how they are read and written."""
