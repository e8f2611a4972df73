"""Who keeps the memory that grows: counts of containers a few steps apart, the lines that add to them, and names that
hold them.
"""
