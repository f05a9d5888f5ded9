"""Starts processes, lets them join, finds out which failed first, and ends them.

Main entry: `launch.run_script`. It needs neither an engine nor, in the launcher itself, torch.
"""
