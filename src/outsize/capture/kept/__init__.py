"""Keeps on disk what was found out from recordings of a model, for the next question about the same model.

Main entry: `store.KeptModel`. `identity` says what counts as the same model; `sources` which files of code an
answer depends on. Only data is kept, never code, and nothing is kept of what cannot be compared with
certainty.
"""
