"""Packed tensors: one parameter, whose value is in several plain tensors, such as codes and scales.

    weight                      parts
    Int8Tensor of torchao       qdata (int8), scale, zero_point         any class that torch can flatten
    Params4bit of bitsandbytes  data (uint8), quant_state.absmax, quant_state.code, quant_state.state2.absmax, ...
    Int8Params of bitsandbytes  data (int8), SCB

Whoever copies, sends, frees, counts or stores a packed tensor does so with its parts. bitsandbytes keeps references to
parts in modules too; `settle` brings them back to the parameter.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from drumline.core.errors import ModelError

Parts = dict[str, Tensor]
_DATA, _STATE, _SCALES = "data", "quant_state", "SCB"
_KEPT = "scales"  # our own reference to the scales, which a forward takes from the weight


@dataclass(frozen=True, slots=True)
class Packing:
    """How the tensors of one library are packed: into which parts, and a new tensor like one, of other parts."""

    parts: Callable[[Any], Parts]
    put: Callable[[Any, Mapping[str, Tensor]], None]
    like: Callable[[Any, Mapping[str, Tensor]], Tensor]
    shape: Callable[[Any], torch.Size]


def packing_of(tensor: Tensor) -> Packing | None:
    """Return how a tensor is packed, or None of a plain one.

    >>> packing_of(nn.Parameter(torch.ones(2))) is None
    True
    """
    kind = type(tensor)
    if kind is Tensor or kind is nn.Parameter:
        return None
    if is_traceable_wrapper_subclass(tensor):
        return None if kind.__module__.startswith("torch.distributed.") else _WRAPPED
    library: Any = sys.modules.get("bitsandbytes")
    if library is None:
        return None
    if isinstance(tensor, library.nn.Params4bit):
        return _FOUR_BITS if tensor.__dict__.get(_STATE) is not None else None
    return _EIGHT_BITS if isinstance(tensor, library.nn.Int8Params) and tensor.dtype is torch.int8 else None


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor's value is in several plain tensors."""
    return packing_of(tensor) is not None


def parts_of(tensor: Tensor) -> Parts:
    """Return the plain tensors that hold a tensor's value, by name; of a plain tensor, itself.

    >>> parts_of(torch.ones(1))
    {'data': tensor([1.])}
    """
    packing = packing_of(tensor)
    return {_DATA: tensor.detach()} if packing is None else packing.parts(tensor)


def num_bytes(tensor: Tensor) -> int:
    """Return the memory that a tensor's value takes: of a packed one, all of its parts.

    >>> num_bytes(torch.ones(3))
    12
    """
    packing = packing_of(tensor)
    return tensor.nbytes if packing is None else sum(part.nbytes for part in packing.parts(tensor).values())


def kind_of(tensor: Tensor) -> str:
    """Return a tensor's dtype in words; of a packed one, with its class.

    >>> kind_of(torch.ones(1))
    'torch.float32'
    """
    return f"{tensor.dtype} as {type(tensor).__name__}" if is_packed(tensor) else str(tensor.dtype)


def unpacked_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of what a tensor stands for: 4-bit codes are stored in another one.

    >>> unpacked_shape(torch.ones(2, 3))
    torch.Size([2, 3])
    """
    packing = packing_of(tensor)
    return tensor.shape if packing is None else packing.shape(tensor)


def put_parts(tensor: Tensor, parts: Mapping[str, Tensor]) -> None:
    """Give a packed tensor other parts, on the same device; the object stays."""
    packing = packing_of(tensor)
    assert packing is not None, "a packed tensor"
    packing.put(tensor, parts)


def put_value(tensor: Tensor, parts: Mapping[str, Tensor]) -> None:
    """Give a tensor other memory, by the parts that `parts_of` returned of another; the object stays.

    >>> value = torch.zeros(1); put_value(value, parts_of(torch.ones(1))); value
    tensor([1.])
    """
    if is_packed(tensor):
        put_parts(tensor, parts)
    else:
        tensor.data = parts[_DATA]


def like(tensor: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor packed as another one is, of these parts, which may be on another device."""
    packing = packing_of(tensor)
    assert packing is not None, "a packed tensor"
    return packing.like(tensor, parts)


def mapped_parts(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor packed as another one is, with every part changed."""
    return like(tensor, {name: change(part) for name, part in parts_of(tensor).items()})


def copied_states(tensor: Tensor, copied: Tensor) -> dict[int, Any]:
    """Return what else stands for a packed tensor's copy in a copied module, by the id of what it stands for."""
    state = tensor.__dict__.get(_STATE)
    return {} if state is None else {id(state): copied.__dict__[_STATE]}


def settle(modules: Iterable[nn.Module]) -> None:
    """Bring what bitsandbytes keeps in modules back to their weights, and quantise weights that wait for it.

    Its layers quantise when they first move to a device. Its 8-bit layers take their scales from the weight in their
    first forward; they do so again in the next.
    """
    library: Any = sys.modules.get("bitsandbytes")
    if library is None:
        return
    for module in modules:
        weight = module._parameters.get("weight")
        if isinstance(weight, library.nn.Params4bit):
            _settle_four(module, weight)
        elif isinstance(weight, library.nn.Int8Params):
            _settle_eight(module, weight)


def _settle_four(module: Any, weight: Any) -> None:
    weight.module = module  # a copy of the weight still has the original's
    # Else an evaluation on some hosts packs the weight again in place, and computes in bfloat16 from then on.
    module.support_avx512bf16_for_cpu = False
    if not weight.bnb_quantized and weight.quant_state is None:
        weight._quantize(weight.device)
    if weight.quant_state is None:
        weight.quant_state = module.quant_state
    module.quant_state = weight.quant_state


def _settle_eight(module: Any, weight: Any) -> None:
    if weight.has_fp16_weights:
        return
    if weight.dtype is not torch.int8:
        weight._quantize(weight.device)
    state = module.__dict__.get("state")
    if weight.SCB is None and state is not None and state.SCB is not None:
        weight.SCB = state.SCB
    if weight.SCB is None:
        weight.SCB = weight.__dict__.get(_KEPT)
    weight.CB, weight.__dict__[_KEPT] = weight.data, weight.SCB
    if state is not None:
        state.reset_grads()


def refuse_strange(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters that are neither plain nor packed, and packed ones that train."""
    for name, tensor in named:
        kind = type(tensor)
        if kind is Tensor or kind is nn.Parameter:
            continue
        if is_packed(tensor):
            if tensor.requires_grad:
                raise ModelError(
                    f"the parameter {name} is a {kind.__name__}, a quantised weight, and trains",
                    expected="quantised weights that are frozen, and adapters that train",
                    fix="freeze it: requires_grad_(False)",
                )
        elif kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise ModelError(
                f"the parameter {name} is a {kind.__module__}.{kind.__name__}, a class of tensors without parts",
                expected="plain parameters, or a class with __tensor_flatten__ and __tensor_unflatten__",
                fix=f"replace it by a plain one: nn.Parameter({name}.dequantize()), or give its class these methods",
            )


def _wrapped_parts(tensor: Any) -> Parts:
    tensors: Parts = {}
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        inner = getattr(tensor, name)
        if is_traceable_wrapper_subclass(inner):
            tensors.update({f"{name}.{below}": part for below, part in _wrapped_parts(inner).items()})
        else:
            tensors[name] = inner
    return tensors


def _put_wrapped(tensor: Any, parts: Mapping[str, Tensor]) -> None:
    for path, part in parts.items():
        *above, last = path.split(".")
        holder = tensor
        for name in above:
            holder = getattr(holder, name)
        setattr(holder, last, part)


def _wrapped_like(tensor: Any, parts: Mapping[str, Tensor]) -> Tensor:
    parameter = _unflattened(tensor, parts)
    if isinstance(tensor, nn.Parameter):
        parameter = nn.Parameter(parameter, requires_grad=tensor.requires_grad)
    others = {name: value for name, value in tensor.__dict__.items() if name not in parameter.__dict__}
    parameter.__dict__.update(others)
    return parameter


def _unflattened(tensor: Any, parts: Mapping[str, Tensor]) -> Tensor:
    names, context = tensor.__tensor_flatten__()
    inner = {}
    for name in names:
        below = {path.removeprefix(f"{name}."): part for path, part in parts.items() if path.startswith(f"{name}.")}
        inner[name] = _unflattened(getattr(tensor, name), below) if below else parts[name]
    new_tensor: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    return new_tensor


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().as_subclass(Tensor)


def _tensors_in(state: Any) -> Parts:
    """Return the tensors of a state of bitsandbytes, and those of a state in it."""
    tensors: Parts = {}
    for name, value in vars(state).items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, type(state)):
            tensors.update({f"{name}.{below}": part for below, part in _tensors_in(value).items()})
    return tensors


def _state_with(state: Any, parts: Mapping[str, Tensor]) -> Any:
    """Return a copy of such a state with other tensors."""
    new_state = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, type(state)):
            below = {path.removeprefix(f"{name}."): part for path, part in parts.items() if path.startswith(f"{name}.")}
            setattr(new_state, name, _state_with(value, below))
        elif name in parts:
            setattr(new_state, name, parts[name])
    return new_state


def _four_parts(tensor: Any) -> Parts:
    inside = _tensors_in(tensor.quant_state)
    return {_DATA: _plain(tensor), **{f"{_STATE}.{name}": part for name, part in inside.items()}}


def _put_four(tensor: Any, parts: Mapping[str, Tensor]) -> None:
    tensor.data = parts[_DATA]
    inside = {name.removeprefix(f"{_STATE}."): part for name, part in parts.items() if name != _DATA}
    tensor.quant_state = _state_with(tensor.quant_state, inside)
    if tensor.module is not None:
        tensor.module.quant_state = tensor.quant_state


def _subclass_like(tensor: Any, data: Tensor) -> Any:
    subclass_like = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    subclass_like.__dict__.update(tensor.__dict__)
    return subclass_like


def _four_like(tensor: Any, parts: Mapping[str, Tensor]) -> Tensor:
    subclass_like: Tensor = _subclass_like(tensor, parts[_DATA])
    subclass_like.__dict__["module"] = None  # `settle` says which one has it
    _put_four(subclass_like, parts)
    return subclass_like


def _eight_parts(tensor: Any) -> Parts:
    scales = tensor.__dict__.get(_KEPT) if tensor.SCB is None else tensor.SCB
    return {_DATA: _plain(tensor), **({} if scales is None else {_SCALES: scales})}


def _put_eight(tensor: Any, parts: Mapping[str, Tensor]) -> None:
    tensor.data = parts[_DATA]
    tensor.CB = tensor.data
    tensor.SCB = tensor.__dict__[_KEPT] = parts.get(_SCALES)


def _eight_like(tensor: Any, parts: Mapping[str, Tensor]) -> Tensor:
    subclass_like: Tensor = _subclass_like(tensor, parts[_DATA])
    _put_eight(subclass_like, parts)
    return subclass_like


_WRAPPED = Packing(_wrapped_parts, _put_wrapped, _wrapped_like, lambda tensor: tensor.shape)
_FOUR_BITS = Packing(_four_parts, _put_four, _four_like, lambda tensor: tensor.quant_state.shape)
_EIGHT_BITS = Packing(_eight_parts, _put_eight, _eight_like, lambda tensor: tensor.shape)
