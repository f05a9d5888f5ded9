"""Says what Python values hold: attributes of objects (`attributes`), items of containers of any type
(`containers`), and memory that tensors share (`shared_storage`).
"""
