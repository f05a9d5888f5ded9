"""Runs recorded instructions again (`replay`).

Grad, inference and autocast are then as they were at the recording (`modes`).
"""
