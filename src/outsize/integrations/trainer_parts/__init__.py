"""Runs losses in a trainer's own Python over the stages, for the Trainer of transformers.

Start at `own_python.py`, whose calls of models run together; decision 252 says why batches take turns.
"""
