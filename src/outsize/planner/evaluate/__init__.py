"""Prices one candidate: its cost tables, its simulated step, its memory, and its rank among others. The main
entry is `candidate.Candidate.of`, by a `pricing.Pricing`. It never generates candidates.
"""
