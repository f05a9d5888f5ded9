"""Train PyTorch models that outsize your GPU."""
