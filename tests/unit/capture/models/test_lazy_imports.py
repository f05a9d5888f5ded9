"""Stand-ins for slow imports: a fit does without the real modules, and who wants more of them gets them."""

from __future__ import annotations

import subprocess
import sys

_FIT = """
import sys
from outsize.capture.models.lazy_imports import stand_in
stand_in()
import torch._dynamo as asked
assert not hasattr(asked, "__wrapped__")  # What Python may ask of a module brings nothing.
assert type(asked).__name__ == "_StandIn"
assert asked.disable(recursive=False)(len) is len and asked.disable(len) is len
from outsize.cli.app import run
assert run(["fit", "torch.nn:Identity", "--input", "4", "--cluster", "2x12GB"]) in (0, 1, 2, 3)
real = sys.modules["torch._dynamo"]
assert type(real).__name__ == "_StandIn", real
import torch
compiled = torch.compile(lambda x: x * 2, backend="eager")
assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
assert type(sys.modules["torch._dynamo"]).__name__ == "module"
assert torch._dynamo.is_compiling() is False
import importlib.util
if importlib.util.find_spec("scipy"):
    from scipy.optimize import linear_sum_assignment, linprog
    assert linear_sum_assignment([[2, 1], [1, 2]])[1].tolist() == [1, 0]
"""


def test_a_fit_compiles_nothing_and_a_compile_still_compiles() -> None:
    done = subprocess.run([sys.executable, "-c", _FIT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


_SIZES = """
import sys
from outsize.capture.models.lazy_imports import stand_in
stand_in("torchvision")
import torch
from torch.fx.experimental import symbolic_shapes as shapes
assert type(shapes).__name__ == "_StandIn", shapes
asked = [("expect_true", True), ("guard_or_false", False), ("guard_or_true", False), ("guard_int", 3)]
asked += [("statically_known_true", True), ("guarding_hint_or_throw", 4), ("guard_size_oblivious", False)]
asked += [("is_nested_int", 3), ("is_symbolic", 3), ("has_guarding_hint", 3)]
asked += [("has_free_unbacked_symbols", torch.ones(2)), ("sym_eq", (1, 2), [1, 2]), ("sym_eq", [1], [1, 1])]
asked += [("sym_eq", 1, 2), ("sym_and", True, False), ("sym_or", True, False), ("sym_and", True)]
told = [getattr(shapes, name)(*given) for name, *given in asked]
assert "sympy.core" not in sys.modules
environment = shapes.ShapeEnv()  # unknown to the stand-in: from here on the real one, sympy with it
import sympy
assert sympy.S(2) + sympy.Symbol("x") == sympy.Symbol("x") + 2
import torch.fx.experimental.symbolic_shapes as real
assert type(real).__name__ == "module" and isinstance(environment, real.ShapeEnv)
assert told == [getattr(real, name)(*given) for name, *given in asked], told
symbol = environment.create_unbacked_symint()
assert shapes.is_symbolic(3) is False and list(shapes._iterate_exprs(3)) == list(real._iterate_exprs(3))
exported = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(4, 2),))
assert exported.module()(torch.ones(4, 2)).shape == (4, 3)
"""


def test_sizes_that_are_numbers_get_the_answers_of_torch_and_symbols_get_torch_itself() -> None:
    done = subprocess.run([sys.executable, "-c", _SIZES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


_SHARDS = """
import sys
from outsize.cli.app import run
assert run(["fit", "torchvision:squeezenet1_1", "--input", "3x64x64", "--cluster", "2x12GB"]) == 0
assert "sympy.core" not in sys.modules and "torchvision.datasets.mnist" not in sys.modules
spec = "transformers:GPT2Config?n_layer=1&n_embd=32&n_head=4&vocab_size=64"
assert run(["fit", spec, "--input", "16", "--cluster", "2x12GB"]) == 0
assert "sympy.core" not in sys.modules
names = ("torch.distributed.tensor", "torch.distributed.tensor.placement_types", "accelerate")
assert all(type(sys.modules[name]).__name__ == "_StandIn" for name in names if name in sys.modules), names
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Shard
assert callable(distribute_module) and Shard(1).is_shard(1) and not Replicate().is_shard()
from transformers.loss import loss_for_object_detection as detection
if hasattr(detection, "PartialState"):
    assert detection.PartialState._shared_state == {}
    from accelerate import Accelerator
    assert type(sys.modules["accelerate"]).__name__ == "module" and Accelerator.__init__
"""


def test_fits_of_libraries_need_no_symbols_and_shard_nothing_and_who_shards_gets_torch_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SHARDS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
