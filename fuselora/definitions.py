"""Every kind of delta from its published definition, in float64, a whole tensor at a time.

``verify`` holds results against these. They share no code with ``delta`` or ``engine``, and are written for
reading: whole tensors, ``einsum``, ``kron``, ``linalg``. Sources: LoRA (Hu et al., 2021), LoHa and LoKr
(Yeh et al., 2023), GLoRA (Chavan et al., 2023), DoRA (Liu et al., 2024), OFT (Qiu et al., 2023), BOFT (Liu et
al., 2023), IA3 (Liu et al., 2022), and what PEFT and LyCORIS save of each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fuselora.kinds.settings import Rotation, Settings

Parts = Mapping[str, torch.Tensor]
# (parts, base) -> a difference, each of its elements a sum of products without a minus in it
Sum = Callable[[Parts, torch.Tensor], torch.Tensor]
DIFFERENCES = ("diff", "diff_b", "diff_m", "w_norm", "b_norm", "pair_bias")
REPLACEMENTS = ("set_weight", "replace", "replace_b", "replace_scale")
ALONE = frozenset((*DIFFERENCES, *REPLACEMENTS))  # one part of the tensor's own shape
MAGNITUDES = ("magnitude", "dora_scale")
LYCORIS_EPSILON = 2.0**-23  # LyCORIS adds the epsilon of float32 to DoRA's norms
# DoRA's magnitudes of these are of the base's columns, which are their outputs
OUTPUTS_LAST = ("embedding", "transposed")


@dataclass(frozen=True, slots=True)
class Exact:
    """A float64 tensor in the base's shape, and ``size``: the magnitudes of all that was summed for it."""

    value: torch.Tensor
    size: torch.Tensor


def difference(kind: str, parts: Parts, base: torch.Tensor) -> Exact:
    """What a kind adds to ``base``, before alpha and strength. Raises ``KeyError`` for a kind that moves."""
    total = SUMS[kind]
    sizes = {part: tensor.abs() for part, tensor in parts.items()}
    return Exact(total(parts, base).reshape(base.shape), total(sizes, base.abs()).reshape(base.shape))


def changed(kind: str, parts: Parts, base: torch.Tensor, ratio: float, settings: Settings) -> Exact:
    """What a moving kind makes of ``base`` at strength 1. Raises ``KeyError`` for a kind that only adds."""
    if kind in CHANGES:
        return CHANGES[kind](parts, base, settings)
    return _decomposed(kind, parts, base, ratio)


def moves(kind: str, parts: Collection[str]) -> bool:
    """Whether the kind's definition is of the changed tensor, as every kind's is with a magnitude."""
    return kind in CHANGES or any(part in parts for part in MAGNITUDES)


# Differences


def _alone(parts: Parts, base: torch.Tensor) -> torch.Tensor:
    del base
    (part,) = parts.values()
    return part


def _pair(parts: Parts, base: torch.Tensor) -> torch.Tensor:
    """up @ down; of a convolution with a core up, core and down are applied one after the other."""
    del base
    up, down = _matrix(parts["up"]), parts["down"]
    if "mid" in parts:
        return torch.einsum("op,pq...,qi->oi...", up, parts["mid"], _matrix(down))
    return torch.einsum("or,r...->o...", up, down)


def _split_pair(parts: Parts, base: torch.Tensor) -> torch.Tensor:
    """up_0, up_1 ... one below the other, each times its own rows of down, of which all have as many."""
    del base
    ups = [_matrix(parts[name]) for name in sorted((p for p in parts if p != "down"), key=_number)]
    downs = parts["down"].chunk(len(ups))
    return torch.cat([torch.einsum("or,r...->o...", *pair) for pair in zip(ups, downs, strict=True)])


def _number(part: str) -> int:
    return int(part.rpartition("_")[2])


def _transposed(parts: Parts, base: torch.Tensor) -> torch.Tensor:
    """(up @ down)^T of a layer that stores (in, out)."""
    return _pair(parts, base).T


def _embedding(parts: Parts, base: torch.Tensor) -> torch.Tensor:
    """(up @ down)^T: (entries, width)."""
    del base
    return (parts["embedding_up"] @ parts["embedding_down"]).T


def _experts(parts: Parts, base: torch.Tensor) -> torch.Tensor:
    """Of each expert up @ down, the ranks of down expert by expert, those of up interleaved.

    The base is (experts, out, in), or (experts, in, out) where only that fits.
    """
    n, (n_out, _) = base.shape[0], parts["up"].shape
    down, up = parts["down"].reshape(n, -1, parts["down"].shape[1]), parts["up"].reshape(n_out, -1, n)
    by_outputs = torch.einsum("ore,eri->eoi", up, down)
    return by_outputs if base.shape == by_outputs.shape else by_outputs.mT


def _loha(parts: Parts, base: torch.Tensor) -> torch.Tensor:
    """(w1_a @ w1_b) * (w2_a @ w2_b), element by element."""
    del base
    return _factored("hada_w1", "hada_t1", parts) * _factored("hada_w2", "hada_t2", parts)


def _lokr(parts: Parts, base: torch.Tensor) -> torch.Tensor:
    """kron(w1, w2), where w1 is as if 1 in each direction of a kernel."""
    del base
    outer, inner = (
        parts[name] if name in parts else _factored(name, core, parts)
        for name, core in (("lokr_w1", "lokr_t1"), ("lokr_w2", "lokr_t2"))
    )
    return torch.kron(outer.reshape(*outer.shape, *[1] * (inner.dim() - 2)), inner.contiguous())


def _glora(parts: Parts, base: torch.Tensor) -> torch.Tensor:
    """W @ (a1 @ a2) + b1 @ b2; what multiplies first has its rank last, in LyCORIS since 2024 a1 and b1."""
    a1, a2, b1 = (_matrix(parts[name]) for name in ("a1", "a2", "b1"))
    newer = a1.shape[0] == base.shape[1] and b1.shape[0] == base.shape[0] and a1.shape[1] <= a1.shape[0]
    left, right, up, down = (
        (a1, a2, b1, parts["b2"]) if newer else (a2, a1, _matrix(parts["b2"]), parts["b1"])
    )
    turned = torch.einsum("oj...,jr,ri->oi...", base, left, right)
    return turned + torch.einsum("or,r...->o...", up, down).reshape(base.shape)


def _factored(stem: str, core: str, parts: Parts) -> torch.Tensor:
    """``stem``_a @ ``stem``_b, or with a core sum_pq a[p, o] core[p, q, kernel ...] b[q, i]."""
    left, right = parts[f"{stem}_a"], parts[f"{stem}_b"]
    if core in parts:
        return torch.einsum("po,pq...,qi->oi...", left, parts[core], right)
    return torch.einsum("or,r...->o...", _matrix(left), right)


def _matrix(part: torch.Tensor) -> torch.Tensor:
    """(rows, columns) of a layer whose kernel is one place."""
    return part.reshape(part.shape[0], -1)


# Changed tensors


def _replaced(parts: Parts, base: torch.Tensor, settings: Settings) -> Exact:
    """The part itself."""
    del settings
    (part,) = parts.values()
    value = part.reshape(base.shape)
    return Exact(value, value.abs())


def _decomposed(kind: str, parts: Parts, base: torch.Tensor, ratio: float) -> Exact:
    """DoRA: m * V / |V| of V = W + alpha / rank * difference, |V| of each output, or of each input."""
    (name,) = (part for part in MAGNITUDES if part in parts)
    added = difference(kind, {part: t for part, t in parts.items() if part != name}, base)
    value, size = base + ratio * added.value, base.abs() + abs(ratio) * added.size
    kept = 1 if _by_columns(kind, name, parts[name], base) else 0
    norm = _norm(value, kept) + (LYCORIS_EPSILON if name == "dora_scale" else 0.0)
    along = [1] * base.dim()
    along[kept] = base.shape[kept]
    gain = parts[name].reshape(along) / norm
    # what V is off by, its norm is off by in the same proportion
    return Exact(gain * value, gain.abs() * (size + value.abs() * _norm(size, kept) / norm))


def _by_columns(kind: str, name: str, magnitude: torch.Tensor, base: torch.Tensor) -> bool:
    if name == "magnitude":
        return kind in OUTPUTS_LAST
    return magnitude.shape != (base.shape[0], *[1] * (magnitude.dim() - 1))


def _norm(value: torch.Tensor, kept: int) -> torch.Tensor:
    """The Euclidean norm over all dimensions but one."""
    others = [d for d in range(value.dim()) if d != kept]
    return value.pow(2).sum(others, keepdim=True).sqrt()


def _peft_ia3(parts: Parts, base: torch.Tensor, settings: Settings) -> Exact:
    """l * W, l of the inputs (1, in) of a feed-forward layer, else of the outputs (out, 1).

    Of a convolution it is (1, channels, 1 ...) in both cases, and the configuration tells them apart.
    """
    numbers = parts["ia3_l"]
    if numbers.dim() == 2:
        return _scaled(numbers, base, 0 if numbers.shape == (base.shape[0], 1) else 1)
    inputs = settings.feedforward
    return _scaled(numbers, base, 1 if numbers.numel() != base.shape[0] or inputs else 0)


def _peft_ia3_bias(parts: Parts, base: torch.Tensor, settings: Settings) -> Exact:
    """l * b."""
    del settings
    return _scaled(parts["ia3_l"], base, 0)


def _lycoris_ia3(parts: Parts, base: torch.Tensor, settings: Settings) -> Exact:
    """(1 + w) * W."""
    return _scaled(1 + parts["weight"], base, 1 if settings.on_input else 0)


def _scaled(gain: torch.Tensor, base: torch.Tensor, dim: int) -> Exact:
    """One number for each output (``dim`` 0) or input (1)."""
    along = [1] * base.dim()
    along[dim] = base.shape[dim]
    value = gain.reshape(along) * base
    return Exact(value, value.abs())


# Rotations


@dataclass(frozen=True, slots=True)
class _Turn:
    """Square matrices, and the magnitudes of the products that they are."""

    value: torch.Tensor
    size: torch.Tensor

    def transposed(self) -> _Turn:
        return _Turn(self.value.mT, self.size.mT)


def _cayley(skew: torch.Tensor) -> _Turn:
    """(I + Q) (I - Q)^-1 of skew-symmetric matrices: orthogonal ones."""
    one = torch.eye(skew.shape[-1], dtype=skew.dtype)
    inverse = torch.linalg.inv(one - skew)
    return _Turn((one + skew) @ inverse, (one + skew.abs()) @ inverse.abs())


def _series(skew: torch.Tensor, terms: int) -> _Turn:
    """I + 2 Q + 2 Q^2 + ... + Q^n, where PEFT cuts the Neumann series of the Cayley transform off.

    n is ``terms`` - 1, with three terms too 3; one term is I and two are I + 2 Q.
    """
    factors = {1: [1], 2: [1, 2]}.get(terms, [1, *[2] * (max(terms, 4) - 2), 1])
    value, size = (
        torch.stack([f * torch.matrix_power(q, n) for n, f in enumerate(factors)]).sum(0)
        for q in (skew, skew.abs())
    )
    return _Turn(value, size)


def _peft_oft(parts: Parts, base: torch.Tensor, settings: Settings) -> Exact:
    """W R^T with R of blocks on the diagonal, over the inputs, of a convolution all of its kernel's."""
    return _over_inputs(_peft_blocks(parts["oft_r"], settings.rotation), base)


def _peft_oft_embedding(parts: Parts, base: torch.Tensor, settings: Settings) -> Exact:
    """W R, over the width."""
    return _over_inputs(_peft_blocks(parts["oft_embedding_r"], settings.rotation).transposed(), base)


def _peft_blocks(upper: torch.Tensor, rotation: Rotation | None) -> _Turn:
    """From the numbers above the diagonals, row by row; the constrained variant's are scaled down first."""
    assert rotation is not None
    n_blocks, n_numbers = upper.shape
    size = round((1 + (1 + 8 * n_numbers) ** 0.5) / 2)
    rows, columns = torch.triu_indices(size, size, 1)
    skew = torch.zeros(n_blocks, size, size, dtype=upper.dtype)
    skew[:, rows, columns] = upper
    skew = skew - skew.mT
    if rotation.eps is not None:
        norm = skew.pow(2).sum((1, 2), keepdim=True).sqrt()
        most = rotation.eps / n_blocks**0.5
        skew = torch.where(norm > most, skew * (most / norm), skew)
    return _cayley(-skew) if rotation.terms is None else _series(skew, rotation.terms)


def _peft_boft(parts: Parts, base: torch.Tensor, settings: Settings) -> Exact:
    """s * W B^T, B the product of butterfly factors, the last one first; blocks (factors, n, size, size)."""
    del settings
    stages, weight = parts["boft_r"], base.reshape(base.shape[0], -1)
    skew = (stages - stages.mT) / 2
    turns = _cayley(-skew)
    found = Exact(weight, weight.abs())
    for i, (value, size) in enumerate(zip(turns.value, turns.size, strict=True)):
        order = _butterfly(weight.shape[1], len(stages), value.shape[0] >> i, value.shape[-1] // 2)
        whole, sizes = (_diagonal(blocks)[order][:, order] for blocks in (value, size))
        found = Exact(found.value @ whole.T, found.size @ sizes.T)
    gain = parts["boft_s"].reshape(-1, 1) if "boft_s" in parts else torch.ones((), dtype=base.dtype)
    return Exact((gain * found.value).reshape(base.shape), (gain.abs() * found.size).reshape(base.shape))


def _diagonal(blocks: torch.Tensor) -> torch.Tensor:
    n, size, _ = blocks.shape
    whole = torch.zeros(n, size, n, size, dtype=blocks.dtype)
    whole[torch.arange(n), :, torch.arange(n)] = blocks
    return whole.reshape(n * size, n * size)


def _butterfly(n: int, n_stages: int, n_groups: int, half: int) -> torch.Tensor:
    """In each of ``n_groups`` the even runs of ``half`` numbers, then the odd ones."""
    if n_stages == 1:
        return torch.arange(n)
    runs = torch.arange(n).reshape(n_groups, -1, half)
    return torch.cat((runs[:, 0::2], runs[:, 1::2]), 1).flatten()


def _lycoris_oft(parts: Parts, base: torch.Tensor, settings: Settings) -> Exact:
    """rescale * R^T W with R of blocks (n, size, size) on the diagonal, over the outputs."""
    turn = _lycoris_turns(parts["oft_blocks"], base, settings)
    return _rescaled(_over_outputs(turn.transposed(), Exact(base, base.abs())), parts)


def _lycoris_boft(parts: Parts, base: torch.Tensor, settings: Settings) -> Exact:
    """rescale * B W, B the product of stages (stages, n, size, size), the first one first.

    Stage i turns rows that are 2^i * size / 2 apart.
    """
    turns = _lycoris_turns(parts["oft_blocks"], base, settings)
    found = Exact(base, base.abs())
    for i, (value, size) in enumerate(zip(turns.value, turns.size, strict=True)):
        apart = value.shape[-1] // 2 << i
        order = torch.arange(base.shape[0]).reshape(-1, 2, apart).mT.flatten()
        back = torch.argsort(order)
        turned = _over_outputs(_Turn(value, size), Exact(found.value[order], found.size[order]))
        found = Exact(turned.value[back], turned.size[back])
    return _rescaled(found, parts)


def _lycoris_turns(blocks: torch.Tensor, base: torch.Tensor, settings: Settings) -> _Turn:
    """The Cayley transform of A - A^T; alpha other than 0, times the outputs, is the most its norm can be."""
    skew = blocks - blocks.mT
    most = (settings.alpha or 0.0) * base.shape[0]
    norm = skew.pow(2).sum().sqrt() + 1e-8
    return _cayley(skew * (most / norm) if 0 < most < norm else skew)


def _rescaled(found: Exact, parts: Parts) -> Exact:
    if "rescale" not in parts:
        return found
    gain = parts["rescale"].reshape(-1, *[1] * (found.value.dim() - 1))
    return Exact(gain * found.value, gain.abs() * found.size)


def _over_outputs(turn: _Turn, weight: Exact) -> Exact:
    """Each block onto its own rows."""
    n, size, _ = turn.value.shape
    shape = weight.value.shape
    value, magnitude = (
        torch.einsum("kij,kj...->ki...", t, w.reshape(n, size, *shape[1:])).reshape(shape)
        for t, w in ((turn.value, weight.value), (turn.size, weight.size))
    )
    return Exact(value, magnitude)


def _over_inputs(turn: _Turn, base: torch.Tensor) -> Exact:
    """W times each block transposed, or a shared one, over the columns that are its own."""
    columns = base.reshape(base.shape[0], -1).T
    n = len(columns) // turn.value.shape[-1]
    blocks = _Turn(turn.value.expand(n, -1, -1), turn.size.expand(n, -1, -1))
    found = _over_outputs(blocks, Exact(columns, columns.abs()))
    return Exact(found.value.T.reshape(base.shape), found.size.T.reshape(base.shape))


SUMS: Mapping[str, Sum] = {
    **dict.fromkeys(DIFFERENCES, _alone),
    "pair": _pair,
    "split_pair": _split_pair,
    "transposed": _transposed,
    "embedding": _embedding,
    "experts": _experts,
    "loha": _loha,
    "lokr": _lokr,
    "glora": _glora,
}
CHANGES: Mapping[str, Callable[[Parts, torch.Tensor, Settings], Exact]] = {
    **dict.fromkeys(REPLACEMENTS, _replaced),
    "ia3": _lycoris_ia3,
    "peft_ia3": _peft_ia3,
    "peft_ia3_b": _peft_ia3_bias,
    "oft": _lycoris_oft,
    "boft": _lycoris_boft,
    "peft_oft": _peft_oft,
    "peft_oft_embedding": _peft_oft_embedding,
    "peft_boft": _peft_boft,
}
