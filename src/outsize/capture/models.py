"""MODEL specs of the command line (being written): for now torchvision's import."""

from outsize.capture.providers import import_torchvision

__all__ = ["import_torchvision"]
