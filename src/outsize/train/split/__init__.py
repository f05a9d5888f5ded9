"""The split model as a module in the user's own loop: its calls, their nodes in autograd, their outputs.

Main entry: `module.SplitModule`, whose call is in `calls.py`. The engine's step never comes here.
"""
