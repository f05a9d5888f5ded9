"""Rules 1 to 5 of docs/capture.md: the smallest module that breaks when a rule is violated."""

from __future__ import annotations

from typing import Any, final

import pytest
import torch
import torch._subclasses
import torch.nn.functional as F
from small_models import Written, batch, linear, two
from splits import captured, check_every_cut, energy, named
from torch import Tensor, nn

from outsize.capture.fakes.fake_model import is_fake
from outsize.capture.recording.fallbacks import record
from outsize.errors import ExampleRejected, NotCapturable
from outsize.train.check.leaf_outputs import watched_modules


def all_state(model: nn.Module) -> list[Any]:
    """Every attribute and table of every module, by identity."""
    tables = [dict(m.__dict__) for m in model.modules()]
    inner = [dict(m.__dict__[k]) for m in model.modules() for k in ("_parameters", "_buffers", "_modules")]
    return [[(k, id(v)) for k, v in table.items()] for table in (*tables, *inner)]


# -- 1: fakes go in, everything comes back -----------------------------------------------------------


def meddling(model: Any, x: Tensor) -> Tensor:
    model.fresh = x.shape[0]
    model.__dict__.pop("old", None)
    model.history.append(x)
    model.table["last"] = [x]
    return model.b(model.a(x) + model.tensors[0])


def meddled() -> Written:
    return two(meddling, old=1, history=[], table={}, tensors=[torch.ones(4)])


def test_rule_1_the_model_is_afterwards_what_it_was() -> None:
    model = meddled()
    before, tensors, real = all_state(model), model.tensors, model.tensors[0]
    record(model, (batch(),), {}, energy)
    assert all_state(model) == before
    assert (model.history, model.table) == ([], {})
    assert model.tensors is tensors
    assert model.tensors[0] is real
    assert not any(is_fake(t) for t in model.parameters())


def test_rule_1_also_when_the_forward_raises() -> None:
    def failing(model: Any, x: Tensor) -> Tensor:
        meddling(model, x)
        raise KeyError("no")

    model = two(failing, old=1, history=[], table={}, tensors=[torch.ones(4)])
    before = all_state(model)
    with pytest.raises(ExampleRejected, match="KeyError"):
        record(model, (batch(),), {}, energy)
    assert all_state(model) == before
    assert (model.history, model.table, model.old) == ([], {}, 1)
    assert nn.Module.__call__.__qualname__ == "Module._wrapped_call_impl"


def test_rule_1_weights_on_meta_are_enough() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 1 << 20), nn.ReLU(), nn.Linear(1 << 20, 4))
    found = captured(model, batch())
    assert [u.name for u in found.graph.units] == ["0", "1", "2", "sum"]
    assert found.graph.parameter_bytes == 4 * (9 * (1 << 20) + 4)


def test_rule_1_tensors_in_attributes_lists_and_dicts_are_weights() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x) * m.plain + m.listed[0] + m.nested["k"][1])

    model = two(run, plain=torch.randn(4), listed=[torch.randn(4)], nested={"k": [1, torch.randn(4)]})
    found = check_every_cut(model, batch())
    used = {w.name for i in found.tape.instructions for w in i.weights if w.kind == "attribute"}
    assert used == {"plain", "listed[0]", "nested['k'][1]"}
    assert found.tape.constants == {}


# -- 2: four levels of interception ------------------------------------------------------------------


@final
class Cube(torch.autograd.Function):
    """A custom backward that no composition of ops gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return 3 * ctx.saved_tensors[0] * grads[0]


def test_rule_2_leaves_glue_and_custom_functions_are_one_instruction_each() -> None:
    found = check_every_cut(two(lambda m, x: m.b(Cube.apply(F.gelu(m.a(x))))), batch())
    assert [i.name for i in found.tape.instructions][:4] == ["a", "gelu", "apply", "b"]


def test_rule_2_an_apply_that_was_bound_before_is_one_instruction() -> None:
    cube = Cube.apply
    found = check_every_cut(two(lambda m, x: m.b(m.cube(cube(m.a(x)))), cube=Cube.apply), batch())
    assert [i.name for i in found.tape.instructions][:4] == ["a", "apply", "apply", "b"]
    assert [i.target for i in found.tape.instructions[1:3]] == [cube, cube]


def below_python(x: Tensor) -> Tensor:
    """Calls a function as an extension in C++ does: nothing of Python's `apply` runs."""
    return vars(torch._C._FunctionBase)["apply"].__get__(None, Cube)(x)


def test_rule_2_a_function_of_an_extension_is_refused_with_its_line() -> None:
    with pytest.raises(NotCapturable, match=r"autograd function of C\+\+.*test_rules_recording.py:\d+"):
        record(two(lambda m, x: m.b(below_python(m.a(x)))), (batch(),), {}, energy)


def test_rule_2_a_function_of_an_extension_in_a_submodule_runs_live() -> None:
    model = two(
        lambda m, x: m.b(m.inner(m.a(x))), inner=Written(lambda m, x: m.c(below_python(x)), c=linear())
    )
    found = check_every_cut(model, batch())
    assert [i.name for i in found.tape.instructions][:3] == ["a", "inner", "b"]


def test_rule_2_torch_is_afterwards_what_it_was() -> None:
    base = torch.autograd.function._SingleLevelFunction
    before = dict(vars(base)), vars(torch.autograd.Function)["apply"]
    model = two(lambda m, x: m.b(Cube.apply(m.a(x))))
    record(model, (batch(),), {}, energy)
    with watched_modules(model):
        record(model, (batch(),), {}, energy)
        assert "apply" in vars(base)
    assert (dict(vars(base)), vars(torch.autograd.Function)["apply"]) == before


def test_rule_2_vmap_is_recorded_below_as_aten_ops_with_the_callers_grad() -> None:
    model = two(lambda m, x: m.b(torch.func.vmap(lambda row: row * 2 + row.sum())(m.a(x))))
    found = check_every_cut(model, batch())
    aten = [i for i in found.tape.instructions if hasattr(i.target, "_overloadpacket")]
    assert aten
    assert all(i.modes.grad and found.tape.metas[next(i.defines())].requires_grad for i in aten)


def test_rule_2_a_module_inside_vmap_is_walked_through() -> None:
    found = check_every_cut(two(lambda m, x: m.b(torch.func.vmap(m.a)(x * 1.0))), batch())
    assert "a" not in {i.name for i in found.tape.instructions}
    assert {"a.weight", "a.bias"} <= {p for i in found.tape.instructions for p in i.parameters()}


def test_rule_2_a_transform_that_differentiates() -> None:
    check_every_cut(two(lambda m, x: m.b(torch.func.grad(lambda t: (t**3).sum())(m.a(x)))), batch())


def test_rule_2_parameters_lent_by_functional_call() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        lent = {"weight": m.b.weight * 2, "bias": m.b.bias}
        return m.b(torch.func.functional_call(m.a, lent, (x,)))

    found = check_every_cut(two(run), batch())
    assert {p for i in found.tape.instructions for p in i.parameters()} == {"b.weight", "b.bias"}


def test_rule_2_scripted_functions_and_iteration() -> None:
    @torch.jit.script
    def swish(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    def run(m: Any, x: Tensor) -> Tensor:
        rows = list(m.a(x).t())
        return m.b(swish(torch.stack(rows, 1)))

    names = [i.name for i in check_every_cut(two(run), batch()).tape.instructions]
    assert "iter" in names or "unbind" in names


def test_rule_2_a_tensor_hook_set_in_forward_acts_in_every_step() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 2)
        return m.b(y)

    found = check_every_cut(two(run), batch())
    assert named(found, "register_hook").writes


def test_rule_2_weights_that_a_closure_uses_belong_to_the_instruction() -> None:
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.y = layer(ctx.x)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
            torch.autograd.backward(ctx.y, grads[0])
            return ctx.x.grad, None

    found = check_every_cut(two(lambda m, x: m.b(Through.apply(x.clone().requires_grad_(), m.a))), batch())
    assert named(found, "apply").parameters() == ("a.weight", "a.bias")


# -- 3: identity of values -----------------------------------------------------------------------------


def test_rule_3_a_tensor_from_before_is_a_constant_by_reference() -> None:
    constant = torch.randn(4)
    found = check_every_cut(two(lambda m, x: m.b(m.a(x) * constant)), batch())
    assert [t is constant for t in found.tape.constants.values()] == [True]


@final
class Stash(nn.Module):
    """A leaf that hands a second tensor out in an object that nobody looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, box: list[Tensor]) -> Tensor:
        box.append(x * 3)
        return x * self.scale


def test_rule_3_and_10_a_leaked_tensor_opens_its_leaf_and_is_never_baked() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        box: list[Tensor] = []
        return m.b(m.stash(m.a(x), box)) + box[0]

    found = check_every_cut(two(run, stash=Stash()), batch())
    assert found.tape.constants == {}
    assert any("stash: walked through" in note for note in found.graph.notes)


def test_rule_3_a_hook_that_holds_an_activation_makes_its_module_a_leaf() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y, gate = m.a(x), m.b(x).detach()
        if y.requires_grad:
            y.register_hook(lambda grad: grad * gate)
        return y

    found = check_every_cut(nn.Sequential(linear(), two(run), linear()), batch())
    assert [u.name for u in found.graph.units] == ["0", "1", "2", "sum"]


# -- 4: a result that is an argument ----------------------------------------------------------------------


def test_rule_4_a_result_that_is_its_argument_has_its_own_slot() -> None:
    model = two(lambda m, x: m.b(m.same(m.a(x)).contiguous()), same=nn.Identity())
    tape = check_every_cut(model, batch()).tape
    outs = [next(i.defines()) for i in tape.instructions[:4]]
    assert len(set(outs)) == 4
    assert len({tape.storage(s) for s in outs[:3]}) == 1


class Alias(nn.Module):
    """A leaf that gives a fake back as it is, and a real tensor not (as `contiguous` may)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x if is_fake(x) else x * self.scale


def test_rule_4_what_is_only_an_alias_among_fakes_is_followed_to_its_last_slot() -> None:
    check_every_cut(nn.Sequential(linear(), Alias(), linear()), batch())


# -- 5: libraries that look for fakes ---------------------------------------------------------------------


def test_rule_5_libraries_do_not_see_fake_tensors() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        return m.b(y * 100 if isinstance(y, torch._subclasses.FakeTensor) else y)

    real = torch._subclasses.FakeTensor
    check_every_cut(two(run), batch())
    assert torch._subclasses.FakeTensor is real
