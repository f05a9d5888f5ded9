"""Defines the verbs of the command line, one file for each: its options and what it calls."""
