"""What happened, measured: of runs, decompositions, conversions, smaller models, programs that were watched."""
