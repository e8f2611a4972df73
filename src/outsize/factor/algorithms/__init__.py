"""From data to factors: passes over the data, and the work on what they leave."""
