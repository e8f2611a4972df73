"""Files and buffers below the formats: aligned transfers, unfinished outputs, chunks, views."""
