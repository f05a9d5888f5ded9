"""Finds the weights of a program: those that share memory (`shared_storage`), and each by its name at a call
(`weight_lookup`).
"""
