"""Under which name does a program find a weight? Of the model and of the loss (`of_loss`), in their tables,
and in what hangs on their modules and tensors (`lookup`).
"""
