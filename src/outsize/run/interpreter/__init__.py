"""Executes one rank's row of a schedule, action by action, and lets the ranks of one process take turns.

Main entry: `interpreter.Interpreter`. New behaviour is a new action, never a condition here.
"""
