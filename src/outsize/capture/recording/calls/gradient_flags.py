"""Finds which values of a tape require a gradient, where the recording saw an op below autograd.

Ops that no public function calls (C entry points, bodies of vmap) are dispatched to the recorder below
autograd, so their results do not require gradients yet. What a result will be is foreseen at once, because
later calls ask; when all is recorded the ops run once more where autograd sees them, which settles it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import OpOverload

from outsize.capture.fakes.fake_model import FakeModel
from outsize.capture.recording.calls.failures import FrameFailed
from outsize.capture.recording.intercept import has_custom_backward, on_real_tensors
from outsize.capture.recording.slots import Slots
from outsize.program.tape import Instruction, Ref, Weight
from outsize.program.tree import leaves, map_leaves


@final
class GradientFlags:
    """Whether the slots of one recording require a gradient."""

    def __init__(self, instructions: list[Instruction], slots: Slots, fakes: FakeModel) -> None:
        self._instructions, self._slots, self._fakes = instructions, slots, fakes

    def foresee(self, op: Any) -> None:
        """Corrects the slots of an ATen op, which runs below autograd: their results do not require
        grad yet.
        """
        instruction = self._instructions[-1] if self._instructions else None
        if instruction is None or instruction.target is not op or "detach" in str(op):
            return
        wanted = instruction.modes.grad and any(
            self._slots.metas[s].requires_grad for s in instruction.reads()
        )
        for slot in instruction.defines() if wanted else ():
            self._slots.will_require_grad(slot)

    def settle(self) -> None:
        """Corrects which results of ATen ops require a gradient: the ops run once more, where autograd sees
        them. During the recording they ran below it.
        """
        made: dict[int, Tensor] = {}
        for instruction in self._instructions:
            if isinstance(instruction.target, OpOverload):
                # What cannot be run by itself (a write into a leaf, say) keeps what was foreseen.
                with on_real_tensors(), self._fakes.mode, suppress(RuntimeError):
                    self._run_again(instruction, made)

    def _run_again(self, instruction: Instruction, made: dict[int, Tensor]) -> None:
        def given(leaf: Any) -> Any:
            if isinstance(leaf, Weight):
                owner, _, name = leaf.name.rpartition(".")
                return getattr(self._fakes.modules[owner], name)
            if not isinstance(leaf, Ref):
                return leaf
            if leaf.slot not in made:
                meta = self._slots.metas[leaf.slot]
                fake = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
                with torch.enable_grad():
                    made[leaf.slot] = fake.requires_grad_().clone() if meta.requires_grad else fake
            return made[leaf.slot]

        args, kwargs = map_leaves(given, (instruction.args, instruction.kwargs))
        with torch.set_grad_enabled(instruction.modes.grad):
            out: Any = instruction.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        for ref, tensor in zip(leaves(instruction.out), leaves(out), strict=True):
            if isinstance(ref, Ref) and isinstance(tensor, Tensor):
                made[ref.slot], meta = tensor, self._slots.metas[ref.slot]
                self._slots.metas[ref.slot] = replace(meta, requires_grad=tensor.requires_grad)

    def insist_on_recorded_backwards(self, args: Any, kwargs: Any) -> None:
        """Checks that no tensor has got its gradient from an autograd function whose forward alone was seen,
        op by op and without gradients: a replay would have none. Raises FrameFailed.
        """
        for tensor in leaves((args, kwargs)):
            slot = self._slots.slot_of(tensor) if isinstance(tensor, Tensor) else None
            if slot is None or self._slots.metas[slot].requires_grad or not has_custom_backward(tensor):
                continue
            made = next((i for i in reversed(self._instructions) if slot in i.defines()), None)
            if made is not None and not made.modes.grad:
                reason = "it calls an autograd function of C++, whose backward no tape can hold"
                raise FrameFailed(made.frame, reason, made.where)
