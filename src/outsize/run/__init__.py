"""Doing: stage programs, transports, and the interpreter of schedules."""
