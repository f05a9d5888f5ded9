"""Answers which device computes wrong: ranks repeat each other's work while they idle, and compare bits.

Start at verification.py: which steps are verified, who checks whom, and when it stays off. places.py performs
the actions SHOW and VERIFY, verdict.py says who is wrong. It changes no number of a step.
"""
