"""Stands in for weights of other ranks: shape, dtype and flags, and an error where values are used.

Torch computes with tensors on meta without a word, so `teacher.mul_(0.9).add_(student)` on a rank that has
freed the teacher would do nothing. A freed weight is a tensor on meta that raises instead. What asks for no
values works: sizes, `requires_grad`, `grad`, hooks, copies of a module, a state dict whose entries are freed
as well, and loading into it, since the rank that has the weight loads the same. Where code says that every
rank runs it (`on_every_rank`), arithmetic of weights that one other rank has is left to that rank:

    teacher.mul_(0.9).add_(student, alpha=0.1)     rank 1 has both and computes, the others go on
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NoReturn, final

import torch
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.program.values.wrapper_tensors import WrapperStructure, is_wrapper, plain_parts

# Properties and methods that need no values.
_PROPERTIES: Final = (
    "_backward_hooks _base _grad _post_accumulate_grad_hooks _version device dtype grad grad_fn is_cpu "
    "is_cuda is_leaf is_meta is_mkldnn is_mps is_nested is_quantized is_sparse is_sparse_csr is_xpu itemsize "
    "layout name names nbytes ndim output_nr requires_grad retains_grad shape"
)
_METHODS: Final = (
    "__format__ __hash__ __len__ __repr__ dim element_size get_device is_complex is_contiguous "
    "is_floating_point is_inference is_shared is_signed ndimension nelement numel register_hook "
    "register_post_accumulate_grad_hook requires_grad_ retain_grad size storage_offset stride"
)


def _readable() -> frozenset[Any]:
    names = [getattr(Tensor, name, None) for name in _PROPERTIES.split()]
    accessors = [getattr(p, kind, None) for p in names for kind in ("__get__", "__set__", "__delete__")]
    methods = [getattr(Tensor, name) for name in _METHODS.split()]
    functions = [
        torch.is_complex,
        torch.is_floating_point,
        torch.numel,
        torch._has_compatible_shallow_copy_type,  # pyright: ignore[reportPrivateImportUsage]
    ]
    return frozenset((*filter(None, accessors), *methods, *functions))


_READABLE: Final = _readable()
# These need the shape alone; with a device they make memory there, and without one a tensor on meta, with
# which torch would compute without a word.
_OF_THE_SHAPE: Final = frozenset((torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like))
_COMPARISONS: Final = frozenset((Tensor.__eq__, Tensor.__ne__))
# These give the same values under another tensor.
_ALIASES: Final = frozenset((Tensor.detach, vars(torch._C.TensorBase)["data"].__get__))
_STAYS: Final = (Tensor.to, vars(torch._C.TensorBase)["data"].__set__)


_EVERY_RANK: Final = ContextVar("every rank", default=False)
_OPERATORS: Final = "add radd sub rsub mul rmul truediv"
_ARITHMETIC: Final = frozenset(
    (
        *(getattr(owner, name) for owner in (Tensor, torch) for name in ("add", "sub", "mul", "div", "lerp")),
        *(getattr(Tensor, f"__{name}__") for name in _OPERATORS.split()),
    )
)
# These change the first argument, and the rank that has it does so.
_CHANGES: Final = frozenset(
    (
        *(getattr(Tensor, f"{name}_") for name in ("add", "sub", "mul", "div", "lerp", "copy")),
        *(getattr(Tensor, f"__i{name}__") for name in ("add", "sub", "mul", "truediv")),
        vars(torch._C.TensorBase)["data"].__set__,
    )
)


@contextmanager
def on_every_rank() -> Iterator[None]:
    """Says that code is run by all ranks alike, as callbacks of a trainer are."""
    before = _EVERY_RANK.set(True)
    try:
        yield
    finally:
        _EVERY_RANK.reset(before)


def _is_elsewhere(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Tells whether one other rank, which runs the same code, has all that this needs."""
    if not _EVERY_RANK.get() or (func not in _CHANGES and func not in _ARITHMETIC):
        return False
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    places = {value._where if isinstance(value, FreedWeight) else None for value in tensors}
    return len(places) == 1 and None not in places


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Computes what needs no values; raises BadOption for everything else."""
    if _is_elsewhere(func, args, kwargs):
        if func in _CHANGES:
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return _freed(func(*args, **kwargs), FreedBuffer, next(_freed_in(args)))
    if func in _STAYS and _stays(func, args, kwargs):
        return args[0] if func is Tensor.to else None
    loads = func is Tensor.copy_ and not isinstance(args[1], FreedWeight)
    makes = func in _OF_THE_SHAPE and kwargs.get("device") is not None
    asks_for_none = func in _COMPARISONS and args[1] is None  # `weight == None`, `None in [weight]`
    if not (loads or makes or asks_for_none) and func not in _READABLE and func not in _ALIASES:
        _refuse(func, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    return _freed(result, FreedBuffer, args[0]) if func in _ALIASES else result


def _stays(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Tells whether a weight is to be as it is: moved to this rank's device, where it would be, or set to
    itself; `model.to(device)` does both.
    """
    weight: Any = args[0]
    if func is not Tensor.to:
        return args[1] is weight
    parse: Any = torch._C._nn._parse_to  # pyright: ignore[reportAttributeAccessIssue]
    device, dtype, _, layout = parse(*args[1:], **kwargs)
    is_home = device is None or (
        device.type == weight._home.type and device.index in (None, weight._home.index)
    )
    return is_home and dtype in (None, weight.dtype) and layout is None


def _copied(self: Any, memo: dict[int, Any]) -> Any:
    return memo.setdefault(id(self), _freed(self, type(self), self))


def _home_of(self: Any) -> torch.device:
    """Returns this rank's device, for code that puts its tensors where the model's weights are."""
    return self._home


@final
class FreedBuffer(Tensor):
    """A buffer whose values are on another rank."""

    _weight_name: str
    _where: str
    _structure: WrapperStructure | None
    _home: torch.device
    device = property(_home_of)  # pyright: ignore[reportAssignmentType]
    __deepcopy__ = _copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


@final
class FreedParameter(nn.Parameter):
    """A parameter whose values are on another rank; it is an instance of that parameter's class, too, where
    that is one tensor and not made of others.
    """

    _weight_name: str
    _where: str
    _structure: WrapperStructure | None
    _kind: type
    _home: torch.device
    device = property(_home_of)  # pyright: ignore[reportAssignmentType]
    __deepcopy__ = _copied

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the weight's class, for code that asks how many bits its codes have."""
        return vars(self).get("_kind", FreedParameter)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


FreedWeight = FreedBuffer | FreedParameter


def freed(weight: Tensor, name: str, where: str, home: torch.device) -> Tensor:
    """Returns what stands on a rank, whose device is `home`, for a weight that `where` (`rank 1`) keeps;
    attributes of a parameter stay.
    """
    structure = WrapperStructure.of(weight) if is_wrapper(weight) else None
    empty = (
        torch.empty_like(weight, device="meta", requires_grad=False) if structure is None else structure.twin
    )
    is_parameter = isinstance(weight, nn.Parameter)
    kind = FreedParameter if is_parameter else FreedBuffer
    made = torch.Tensor._make_subclass(kind, empty, weight.requires_grad)
    inner = {} if structure is None or structure.inner is None else structure.inner
    # The class of a tensor made of others promises methods over these, which are on the other rank.
    told = {"_kind": weight.__class__} if structure is None else {}
    kept = {**vars(weight), **told} if is_parameter else {}
    vars(made).update({key: value for key, value in kept.items() if key not in inner})
    made._weight_name, made._where, made._structure, made._home = name, where, structure, home
    return made


def empty_for_others(weight: nn.Parameter, stand_in: Tensor) -> None:
    """Makes a parameter that has left its module one without values, too.

    A list that was made before, such as that of an average of weights, still has it, and another rank trains
    it on.
    """
    weight.data = weight.data.new_zeros(()).expand(weight.shape)
    vars(weight).update(vars(stand_in))
    weight.__class__ = FreedParameter


def structure_of(weight: Tensor) -> WrapperStructure | None:
    """Returns how a weight is made of other tensors, freed or not; None for a plain one."""
    if isinstance(weight, FreedWeight):
        return weight._structure
    return WrapperStructure.of(weight) if is_wrapper(weight) else None


def parts_of(weight: Tensor) -> dict[str, Tensor]:
    """Returns the plain tensors of which a weight is made, by their path in it; of a freed one on meta."""
    structure = structure_of(weight) if isinstance(weight, FreedWeight) else None
    return plain_parts(weight) if structure is None else structure.twins()


def bare(weight: Tensor) -> Tensor:
    """Returns a freed weight as a plain tensor on meta, and any other as it is."""
    if not isinstance(weight, FreedWeight):
        return weight
    with torch._C.DisableTorchFunctionSubclass():
        return weight.detach().as_subclass(Tensor)


def still_freed(weight: FreedWeight, values: Tensor) -> Tensor:
    """Returns what stands for the same weight in another shape."""
    return _freed(values, type(weight), weight)


def _freed(tensor: Tensor, kind: type[FreedWeight], like: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        requires_grad = issubclass(kind, nn.Parameter) and like.requires_grad
        empty = tensor.detach().as_subclass(Tensor).to("meta")
        made = torch.Tensor._make_subclass(kind, empty, requires_grad)
    vars(made).update(vars(like))
    return made


def _refuse(func: Any, args: Any, kwargs: dict[str, Any]) -> NoReturn:
    weight = next(_freed_in([*args, *kwargs.values()]))
    used_by = getattr(func, "__name__", "a function")
    raise BadOption(
        f"{weight._weight_name} is a weight of {weight._where} and has no values on this rank",
        numbers=f"`{used_by}` uses them",
        next_step='engine.weights.apply_named(fn, "teacher.*", "student.*") calls fn(teacher, student) '
        "wherever these are; engine.weights.module has the weights of this rank alone, "
        "engine.weights.full_state_dict() gathers all",
    )


def _freed_in(values: Any) -> Any:
    for value in values:
        if isinstance(value, FreedWeight):
            yield value
        elif isinstance(value, list | tuple):
            yield from _freed_in(value)
        elif isinstance(value, dict):
            yield from _freed_in(value.values())
