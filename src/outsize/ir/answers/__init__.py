"""Defines the records of a question and of its answer: the planner's request, the fit, what was measured.

Each is frozen data with codes and figures and no sentence; `report` words them.
"""
