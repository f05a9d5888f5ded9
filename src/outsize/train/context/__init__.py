"""Answers what is known of a run before its first step.

Start at run_context.py. `RunContext` is built once and passed down whole: plan, options, this process's place
among the others, and what moves besides messages. Nothing here changes while a run goes on, and nothing runs.
"""
