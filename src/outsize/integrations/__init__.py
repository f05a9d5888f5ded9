"""Adapters that let training frameworks and cluster tools run on outsize; each is one file and one extra.

Nothing is here yet: a plain training loop needs none.
"""
