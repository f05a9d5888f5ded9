"""Turns a tape into a ModelGraph: units in execution order and the values between them.

Main entry: `build`. `by_modules` serves models that cannot be recorded.
"""
