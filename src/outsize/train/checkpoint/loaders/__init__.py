"""Where does a run that goes on take up its loader, and can it be taken up at all?

`loader_states.py` saves and loads the position of a loader, `loader_trial.py` tries a copy at the start.
Never reads a sample of the user's data set for itself where indices are enough.
"""
