"""Says what Python values hold: items of containers of any type (`containers`), and memory that tensors share
(`shared_storage`).
"""
