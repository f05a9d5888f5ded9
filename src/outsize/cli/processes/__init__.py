"""Starts the processes of `outsize run`, `bench`, `tune` and `measure --links`, and holds what they
execute.
"""
