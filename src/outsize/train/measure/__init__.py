"""Times on this machine what a plan will run: units, messages, allocated bytes.

Main entry: `units`. It never chooses a plan.
"""
