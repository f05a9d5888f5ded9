"""Runs stages as graphs of their devices: recorded after two steps, and replayed with the same bits.

Main entry: `graphed_stage.GraphedStage`, which runs a `StageExecutor` where nothing is recorded. It never
decides whether graphs are worth it.
"""
