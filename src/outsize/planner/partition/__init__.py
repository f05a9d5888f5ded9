"""Cuts a chain of units into stages by exact min-max dynamic programs, and says whether any cut fits.

The main entry is `stage_prices.StagePrices.split`. It cuts one layout and never compares layouts.
"""
