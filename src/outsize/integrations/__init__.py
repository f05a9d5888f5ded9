"""Adapters that let training frameworks run on outsize: where does a pipeline go in their loop?

Each is one file and one extra. Start at `transformers.py`, which calls the engine from the loop of
transformers' Trainer; decision 110 says how such a loop and an engine share a step. `loggers.py` writes what
a run tells its callbacks. Nothing here plans, and nothing else in the package imports a framework.
"""
