"""The recorded program of a model and its replay."""
