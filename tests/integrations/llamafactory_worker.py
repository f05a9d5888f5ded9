"""LLaMA-Factory's v1 over processes without an accelerator, for which it would wait after each step."""

import sys

import torch

from outsize.integrations.llamafactory import main

torch.accelerator.synchronize = lambda *_: None
main(sys.argv[1:])
