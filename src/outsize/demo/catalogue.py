"""The sizes of the demo: chosen so that all of it takes less than three minutes on two cores."""

from __future__ import annotations

from outsize.demo.images import ImageJob
from outsize.demo.job import Job, Recipe
from outsize.demo.text import TextJob


def text_job(*, quick: bool) -> Job:
    """GPT-2 on help topics: 9 M parameters, about a minute; quick: a tiny one, a few steps."""
    if quick:
        recipe = Recipe(batch_size=4, steps=6, learning_rate=5e-3, warmup=2)
        return TextJob(layers=2, width=64, context=32, recipe=recipe)
    recipe = Recipe(batch_size=8, steps=110, learning_rate=2e-3, warmup=10)
    return TextJob(layers=5, width=384, context=128, recipe=recipe, goal=3.0)


def image_job(*, quick: bool) -> Job:
    """ResNet-50 on photographs, a few steps; quick: ResNet-18 on small crops."""
    if quick:
        recipe = Recipe(batch_size=8, steps=4, learning_rate=1e-4, warmup=1)
        return ImageJob(builder="resnet18", size=32, microbatches=2, recipe=recipe)
    recipe = Recipe(batch_size=16, steps=8, learning_rate=1e-4, warmup=1)
    return ImageJob(builder="resnet50", size=64, microbatches=4, recipe=recipe)


def job(name: str, *, quick: bool) -> Job:
    """The job of this name; KeyError otherwise."""
    return {"gpt2": text_job, "resnet": image_job}[name](quick=quick)
