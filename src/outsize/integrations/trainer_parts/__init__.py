"""What stands behind the Trainer of transformers: how does a loss in its own Python run over the stages?

Start at `own_python.py`, whose calls of models run together; decision 252 says why batches take turns.
"""
