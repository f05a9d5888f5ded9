"""Prices one candidate: its cost tables, its simulated step, its memory, and its rank among others. The main
entry is `estimate`. It never generates candidates.
"""
