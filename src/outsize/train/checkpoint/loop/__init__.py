"""What of the user's own loop is saved, and how does the loop go on where it was?

`attached.py` has the user's objects and loaders, `generators.py` the random generators that shuffle and
augment the data. `loader_states.py` saves and loads the position of a loader, `loader_trial.py` tries a copy
at the start. Never reads a sample of the user's data set for itself where indices are enough.
"""
