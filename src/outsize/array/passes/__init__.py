"""The kinds of pass: each makes one or more nodes, tile by tile, from what is on disk or was left by earlier passes."""
