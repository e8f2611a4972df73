"""The lazy array that users hold: its methods, keys, protocols and expressions."""
