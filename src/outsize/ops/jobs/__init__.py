"""Writes job files for clusters: what starts a run on Slurm, Kubernetes, Ray, SkyPilot or dstack.

Main entry: `engines.job_text`. One file for each engine turns a `Job` (ir/answers/job.py) into its text; it
plans nothing and starts nothing.
"""
