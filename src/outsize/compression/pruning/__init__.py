"""Channels and heads that really leave a model, through all layers that they connect.

In: a model, the user's batches and loss, how much to keep. Out: a copy whose tensors are smaller, in the same modules, so that
plain torch runs, saves and loads it.

1. `trace.py` runs the model once and sees every operator; `rules.py` says what each one ties together; `axes.py` is the algebra.
2. `verify.py` tries a removal: the smaller model must compute what the whole one does with zeros in these places. It finds the
   numbers that modules keep beside their tensors (`num_heads`), and freezes what stands in code.
3. `scores.py` ranks what is left on the user's data, `choose.py` takes the least important for its bytes, `removal.py` removes.

Why not torch-pruning (1.6.1, with torch 2.13): of the 25 networks of `tests/compression/prunable_networks.py`, called without
help of the user, it left one that does not run (heads in the module's own `view`), one with more weights than before (a tied
embedding came apart) and one as it was; five more ended in an error or in no answer in two minutes (chunk, PixelShuffle, LSTM,
GPT-2, Llama with grouped queries). It prunes by ratio and not to a size in bytes, and shortens normalised axes unasked. Ours
makes 23 of them smaller and refuses two with the reason (`benchmarks/results/2026-11-18-pruning.md`).
"""
