"""Plans that another process takes: written beside what they were made for, and refused where that is another."""
