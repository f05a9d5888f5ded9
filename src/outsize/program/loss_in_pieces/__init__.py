"""Computes a loss over many classes by pieces of its rows, so that logits of all rows never exist at once.

`region` finds the instructions from the last product to the loss that work by rows, `pieces` runs them so,
and `rewrite` puts that in their place on a tape. It never changes what is computed, only how many rows at a
time.
"""
