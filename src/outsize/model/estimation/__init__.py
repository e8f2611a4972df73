"""`outsize.estimate`: traces a step and says how much memory it will take."""
