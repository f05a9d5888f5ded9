"""Text tables of 80 columns for the terminal: plans, fits, verdicts, measurements, offload degrees.

Main entry: `plan_tables`. `table_style` has the pieces that all of them share.
"""
