"""Processes seen from outside, through `/proc`: what a tree of them holds, what limits it, and which line is at work."""
