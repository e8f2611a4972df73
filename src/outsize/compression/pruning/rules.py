"""What each operator says about the axes of its tensors.

In: one call of an operator (`Call`). Out: the axes of its results, after its inputs were tied together as it needs them. A rule
is a function in `RULES`, under the name of the operator. An operator without a rule is made of smaller ones where torch knows
how; otherwise all that it touches stays whole (`opaque`).

One law decides what may leave: if everything that belongs to an index is zero, the result without it must be the same. So an
axis stays whole over which something is normalised, averaged, ordered or compared: a zero counts there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from outsize.compression.pruning.axes import Axis, Dim, Product, Sum, cut, freeze, size_of, split, unify
from outsize.compression.pruning.call import Axes, Call, fresh

NORMALISED = "it is normalised as a whole"
SCALE = "keys and queries are compared along it, and its size sets the scale"
PLACE = "its indices are places or symbols"


def pointwise(call: Call) -> list[Axes]:
    """Element by element, with broadcasting; every result has the same axes."""
    found = fresh(call.outs[0])
    for tensor in call.tensors:
        _broadcast(found, call.axes(tensor))
    return [found] * len(call.outs)


def _broadcast(found: Sequence[Axis], axes: Axes) -> None:
    """Axes are those of a result from the right, where they are not stretched."""
    for one, other in zip(reversed(found), reversed(axes), strict=False):
        if size_of(one) == size_of(other):
            unify(one, other)


def same(call: Call) -> list[Axes]:
    """The axes of the first tensor, whatever the values are."""
    return [call.axes(call.tensors[0])] * len(call.outs)


def created(call: Call) -> list[Axes]:
    """Tensors of a constant value: their sizes come from the program, which is tried afterwards."""
    return [fresh(out) for out in call.outs]


def view(call: Call) -> list[Axes]:
    """Runs of axes with equal products of sizes are merged and split again."""
    sources, sizes = list(call.axes(call["self"])), list(call.outs[0].shape)
    if not call.outs[0].numel():
        return opaque(call)
    found: list[Axis] = []
    while sources or sizes:
        run, out = [sources.pop(0)] if sources else [], [sizes.pop(0)] if sizes else []
        while (left := math.prod(map(size_of, run))) != (right := math.prod(out)):
            if left < right:
                run.append(sources.pop(0))
            else:
                out.append(sizes.pop(0))
        while sources and size_of(sources[0]) == 1 and (not sizes or sizes[0] != 1):
            run.append(sources.pop(0))
        found += split(run[0] if len(run) == 1 else Product(tuple(run)), out) if out else []
    return [tuple(found)]


def permute(call: Call) -> list[Axes]:
    axes = call.axes(call["self"])
    return [tuple(axes[place] for place in call["dims"])]


def transpose(call: Call) -> list[Axes]:
    axes = list(call.axes(call["self"]))
    if call.name == "t":
        return [tuple(reversed(axes))]
    one, other = call["dim0"], call["dim1"]
    axes[one], axes[other] = axes[other], axes[one]
    return [tuple(axes)]


def unsqueeze(call: Call) -> list[Axes]:
    axes = list(call.axes(call["self"]))
    place = call["dim"] % (len(axes) + 1)
    return [(*axes[:place], Dim(1), *axes[place:])]


def squeeze(call: Call) -> list[Axes]:
    axes = call.axes(call["self"])
    places = [place % len(axes) for place in _dims(call, len(axes))]
    return [tuple(axis for place, axis in enumerate(axes) if not (place in places and size_of(axis) == 1))]


def _dims(call: Call, count: int) -> Sequence[int]:
    """The places that a call names; all of them where it names none."""
    dims = call.get("dim", call.get("dims"))
    return range(count) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims


def expand(call: Call) -> list[Axes]:
    found = list(fresh(call.outs[0]))
    for place, axis in enumerate(reversed(call.axes(call["self"])), start=1):
        if size_of(axis) == size_of(found[-place]):
            found[-place] = axis
    return [tuple(found)]


def repeat(call: Call) -> list[Axes]:
    axes, repeats = call.axes(call["self"]), call["repeats"]
    padded = (*(Dim(1) for _ in range(len(repeats) - len(axes))), *axes)
    return [tuple(Product((Dim(n, PLACE), axis)) for n, axis in zip(repeats, padded, strict=True))]


def select(call: Call) -> list[Axes]:
    """One index of an axis, by its place."""
    axes = list(call.axes(call["self"]))
    freeze(axes.pop(call["dim"]), PLACE)
    return [tuple(axes)]


def unbind(call: Call) -> list[Axes]:
    return select(call) * len(call.outs)


def slice_(call: Call) -> list[Axes]:
    """A range of an axis. Where the program has its ends from is found out by a trial."""
    axes = list(call.axes(call["self"]))
    place = call["dim"] % len(axes)
    length = size_of(axes[place])
    start, end, step = slice(call.get("start"), call.get("end"), call.get("step", 1)).indices(length)
    partial = end - start < length
    if (
        step != 1 or end <= start or (partial and call.is_weight(call["self"]))
    ):  # of positions: a longer input needs the rest
        freeze(axes[place], PLACE)
        axes[place] = Dim(call.outs[0].shape[place], PLACE)
    elif partial:
        axes[place] = cut(cut(axes[place], start)[1], end - start)[0]
    return [tuple(axes)]


def split_axis(call: Call) -> list[Axes]:
    """Parts of an axis. Equal parts lose the same indices, so that they stay equal."""
    axes = list(call.axes(call["self"]))
    place = call["dim"] % len(axes)
    parts: tuple[Axis, ...] = tuple(Dim(out.shape[place]) for out in call.outs)
    unify(axes[place], Sum(parts))
    for part in parts[1:]:
        if size_of(part) == size_of(parts[0]):
            unify(part, parts[0])
    return [(*axes[:place], part, *axes[place + 1 :]) for part in parts]


def cat(call: Call) -> list[Axes]:
    tensors = [tensor for tensor in call.tensors if tensor.numel() or tensor.ndim > 1]
    place = (call.get("dim") or 0) % call.outs[0].ndim
    first = call.axes(tensors[0])
    for tensor in tensors[1:]:
        for number, (one, other) in enumerate(zip(first, call.axes(tensor), strict=True)):
            if number != place:
                unify(one, other)
    joined = Sum(tuple(call.axes(tensor)[place] for tensor in tensors))
    return [(*first[:place], joined, *first[place + 1 :])]


def stack(call: Call) -> list[Axes]:
    place = (call.get("dim") or 0) % call.outs[0].ndim
    axes = call.axes(call.tensors[0])
    for tensor in call.tensors[1:]:
        call.tie(axes, call.axes(tensor))
    return [(*axes[:place], Dim(len(call.tensors), PLACE), *axes[place:])]


def pad(call: Call) -> list[Axes]:
    """What is put before and behind an axis stays."""
    axes, pads = list(call.axes(call["self"])), call["pad"]
    for number in range(len(pads) // 2):
        before, after = pads[2 * number : 2 * number + 2]
        if before < 0 or after < 0:
            return opaque(call)
        if before or after:
            axes[-1 - number] = Sum((Dim(before, PLACE), axes[-1 - number], Dim(after, PLACE)))
    return [tuple(axes)]


def reduce(call: Call) -> list[Axes]:
    """Axes that go: along a sum zeros count nothing, along everything else they do."""
    axes = call.axes(call.tensors[0])
    places = {place % max(1, len(axes)) for place in _dims(call, len(axes))}
    for place in places & set(range(len(axes))):
        if call.name != "sum" and not (
            call.through_norms and call.name in ("mean", "var", "var_mean", "linalg_vector_norm")
        ):
            freeze(axes[place], NORMALISED)
    kept = [axis for place, axis in enumerate(axes) if place not in places]
    with_ones = [Dim(1) if place in places else axis for place, axis in enumerate(axes)]
    return [tuple(with_ones if out.ndim == len(axes) else kept) for out in call.outs]


def along(call: Call) -> list[Axes]:
    """Results of the same axes, where each element depends on all along one of them: softmax, cumsum, sort, flip, roll."""
    axes = call.axes(call.tensors[0])
    for place in _dims(call, len(axes)) if axes else ():
        freeze(axes[place], NORMALISED)
    return [
        tuple(
            axis if size_of(axis) == size else Dim(size, NORMALISED) for axis, size in zip(axes, out.shape, strict=True)
        )
        for out in call.outs
    ]


def product(call: Call) -> list[Axes]:
    """mm, bmm, addmm, baddbmm, mv and dot: the last axis of one and the last but one of the other are summed over."""
    pair = [call.get("self"), call.get("mat1"), call.get("batch1"), call.get("mat2"), call.get("batch2"), call.get("mat"),
            call.get("vec"), call.get("tensor"), call.get("other")]  # fmt: skip
    added = call.get("self") if call.name in ("addmm", "baddbmm", "addbmm", "addmv") else None
    one, other = [tensor for tensor in pair if tensor is not None and tensor is not added][:2]
    left, right = call.axes(one), call.axes(other)
    inner = right[-2] if len(right) > 1 else right[0]
    unify(left[-1], inner)
    if not (call.is_weight(one) or call.is_weight(other)):
        freeze(inner, SCALE)
    for a, b in zip(left[:-2], right[:-2], strict=True):
        unify(a, b)
    found = (*left[:-1], *right[-1:]) if len(right) > 1 else left[:-1]
    if added is not None:
        _broadcast(found, call.axes(added))
    return [tuple(found)]


def linear(call: Call) -> list[Axes]:
    source, weight = call.axes(call["input"]), call.axes(call["weight"])
    unify(source[-1], weight[-1])
    if call.get("bias") is not None:
        unify(call.axes(call["bias"])[0], weight[0])
    return [(*source[:-1], *weight[:-1])]


def convolution(call: Call) -> list[Axes]:
    """Channels of groups are a product: groups may leave, or a channel of every group."""
    source, weight, groups = call.axes(call["input"]), call.axes(call["weight"]), call["groups"]
    batched = call.outs[0].ndim == len(weight)
    channels = source[1 if batched else 0]
    group = Dim(groups)
    outer = split(weight[0], [groups, size_of(weight[0]) // groups]) if groups > 1 else [Dim(1), weight[0]]
    unify(group, outer[0])
    if call["transposed"]:
        unify(channels, weight[0])
        out: Axis = Product((group, weight[1]))
    else:
        unify(channels, Product((group, weight[1])))
        out = weight[0]
    for axis in weight[2:]:
        freeze(axis, PLACE)
    if call.get("bias") is not None:
        unify(call.axes(call["bias"])[0], out)
    spatial = fresh(call.outs[0], PLACE)
    return [(source[0], out, *spatial[2:]) if batched else (out, *spatial[1:])]


def batch_norm(call: Call) -> list[Axes]:
    axes = call.axes(call.tensors[0])
    for tensor in call.tensors[1:]:
        if tensor.ndim == 1 and tensor.shape[0] == size_of(axes[1]):
            unify(axes[1], call.axes(tensor)[0])
    return [
        axes,
        *((axes[1],) if out.ndim == 1 and out.shape[0] == size_of(axes[1]) else fresh(out) for out in call.outs[1:]),
    ]


def layer_norm(call: Call) -> list[Axes]:
    axes = call.axes(call.tensors[0])
    count = len(call["normalized_shape"])
    for tensor in call.tensors[1:]:
        call.tie(axes[-count:], call.axes(tensor))
    if not call.through_norms:
        for axis in axes[-count:]:
            freeze(axis, NORMALISED)
    return [axes, *(tuple([*axes[:-count], *(Dim(1) for _ in range(count))][: out.ndim]) for out in call.outs[1:])]


def group_norm(call: Call) -> list[Axes]:
    """Whole groups may leave: the others are normalised as before."""
    axes, groups = call.axes(call["input"]), call["group"]
    group, inside = split(axes[1], [groups, size_of(axes[1]) // groups])
    freeze(inside, NORMALISED)
    for tensor in call.tensors[1:]:
        unify(axes[1], call.axes(tensor)[0])
    return [axes, *((axes[0], group) for _ in call.outs[1:])]


def spatial(call: Call) -> list[Axes]:
    """Pooling, padding, resizing: batch and channels pass, all behind them are places."""
    axes = call.axes(call.tensors[0])
    places = int(next((digit for digit in call.name if digit.isdigit()), "2"))
    for axis in axes[-places:]:
        freeze(axis, PLACE)
    return [(*axes[:-places], *fresh(out, PLACE)[-places:]) for out in call.outs]


def attention(call: Call) -> list[Axes]:
    """Heads pass; several heads of queries may share one of keys and values."""
    query, key, value = (call.axes(call[name]) for name in ("query", "key", "value"))
    heads, shared = query[-3], key[-3]
    repeats = size_of(heads) // size_of(shared)
    unify(heads, shared if repeats == 1 else Product((shared, Dim(repeats, PLACE))))
    unify(shared, value[-3])
    unify(query[-1], key[-1])
    freeze(key[-1], SCALE)
    unify(key[-2], value[-2])
    out = (*query[:-1], value[-1])
    mask = call.get("attn_mask", call.get("attn_bias"))
    if mask is not None and len(call.axes(mask)) > 2 and size_of(call.axes(mask)[-3]) == size_of(heads):
        unify(heads, call.axes(mask)[-3])
    return [out, *(fresh_like(found, out) for found in call.outs[1:])]


def fresh_like(tensor: Any, axes: Axes) -> Axes:
    """The leading axes where they have the same sizes; what else there is stays."""
    return tuple(
        axis if place < len(axes) and size_of(axis) == size else Dim(size, PLACE)
        for place, (axis, size) in enumerate(
            zip((*axes, *(Dim(1) for _ in range(tensor.ndim))), tensor.shape, strict=False)
        )
    )


def embedding(call: Call) -> list[Axes]:
    weight = call.axes(call["weight"])
    freeze(weight[0], PLACE)
    return [(*call.axes(call["indices"]), weight[1])]


def index(call: Call) -> list[Axes]:
    """Some axes by tensors of places, the others pass."""
    axes, chosen = list(call.axes(call["self"])), call["indices"]
    for place, tensor in enumerate(chosen):
        if tensor is not None:
            freeze(axes[place], PLACE)
    places = [place for place, tensor in enumerate(chosen) if tensor is not None]
    rest = [axis for place, axis in enumerate(axes) if place not in places]
    middle = fresh(call.outs[0], PLACE)
    count = len(middle) - len(rest)
    start = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    return [(*rest[:start], *middle[start : start + count], *rest[start:])]


def index_select(call: Call) -> list[Axes]:
    axes = list(call.axes(call["self"]))
    place = call["dim"] % len(axes)
    freeze(axes[place], PLACE)
    axes[place] = Dim(call.outs[0].shape[place], PLACE)
    return [tuple(axes)]


def pixel_shuffle(call: Call) -> list[Axes]:
    axes, factor = list(call.axes(call["self"])), call["upscale_factor"]
    channels, inside = split(axes[-3], [size_of(axes[-3]) // factor**2, factor**2])
    freeze(inside, PLACE)
    return [(*axes[:-3], channels, *fresh(call.outs[0], PLACE)[-2:])]


def opaque(call: Call) -> list[Axes]:
    """All that an operator touches stays whole, since nothing is known of it."""
    why = f"what {call.name} does with it is not known"
    for tensor in call.tensors:
        for axis in call.axes(tensor):
            freeze(axis, why)
    return [fresh(out, why) for out in call.outs]


Rule = Callable[[Call], list[Axes]]
_TABLE: dict[Rule, str] = {
    pointwise: "copy_ _to_copy native_dropout dropout lerp addcmul addcdiv masked_fill masked_fill_ where",
    same: "clone detach alias lift_fresh contiguous bernoulli bernoulli_ uniform_ normal_ empty_like zeros_like ones_like "
    "full_like rand_like randn_like new_empty_strided fill_ zero_ fill to type_as",
    created: "zeros ones full empty new_zeros new_ones new_full new_empty scalar_tensor empty_strided",
    view: "view _unsafe_view reshape _reshape_alias",
    permute: "permute",
    transpose: "transpose t",
    unsqueeze: "unsqueeze",
    squeeze: "squeeze",
    expand: "expand",
    repeat: "repeat",
    select: "select",
    unbind: "unbind",
    slice_: "slice",
    split_axis: "split split_with_sizes",
    cat: "cat",
    stack: "stack",
    pad: "constant_pad_nd",
    reduce: "sum mean var std var_mean amax amin prod max min argmax argmin any all norm linalg_vector_norm logsumexp median",
    along: "_softmax _log_softmax cumsum cumprod sort topk flip roll",
    product: "mm bmm addmm baddbmm mv addmv dot",
    linear: "linear",
    convolution: "convolution _convolution",
    batch_norm: "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm "
    "_batch_norm_with_update _batch_norm_no_update _batch_norm_impl_index miopen_batch_norm",
    layer_norm: "native_layer_norm _fused_rms_norm",
    group_norm: "native_group_norm",
    spatial: "max_pool2d_with_indices max_pool3d_with_indices max_pool1d avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact2d upsample_bilinear2d upsample_linear1d "
    "upsample_bicubic2d upsample_trilinear3d reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
    "replication_pad2d replication_pad3d mkldnn_max_pool2d",
    attention: "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math_for_mps "
    "_scaled_dot_product_fused_attention_overrideable",
    embedding: "embedding",
    index: "index",
    index_select: "index_select",
    pixel_shuffle: "pixel_shuffle",
}  # fmt: skip
RULES: dict[str, Rule] = {name: rule for rule, names in _TABLE.items() for name in names.split()}
"""Operator -> its rule. Operators that torch marks as pointwise need none."""
