"""`outsize.estimate`: what a step will take, from its trace."""
