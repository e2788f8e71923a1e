"""What a delta means beyond its parts and their shapes: numbers of its file, and its configuration's word."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fuselora.bounded_regex import BadPattern, whole
from fuselora.escape import short

MAX_TERMS = 64  # the series has converged long before, or never does
# peft's Cayley-Neumann series is another one since then, and no version was written before
NEUMANN_SINCE = (0, 18)


@dataclass(frozen=True, slots=True)
class Rotation:
    """How PEFT's OFT makes rotations of its numbers.

    ``terms`` of the Cayley-Neumann series, None for the Cayley transform itself; ``eps`` of the constrained
    variant, None without; ``shared``: one block stands for all.
    """

    terms: int | None
    eps: float | None
    shared: bool


@dataclass(frozen=True, slots=True)
class Settings:
    """None where nothing says.

    ``alpha``: the stored one, which OFT takes as its constraint. ``on_input``: LyCORIS' IA3 scales inputs.
    ``feedforward``: PEFT's IA3 scales inputs. ``transposed``: the weight is (in, out). ``parameters``: what
    the configuration may call the module's parameter, where it targets parameters; ``of_parameter``: one was
    found. ``experts``: how many of them the tensor that was found holds, 0 where it is no such tensor.
    ``rotation``: of PEFT's OFT; ``unread`` says why it is None.
    """

    alpha: float | None = None
    on_input: bool | None = None
    feedforward: bool | None = None
    transposed: bool = False
    parameters: tuple[str, ...] = ()
    of_parameter: bool = False
    experts: int = 0
    rotation: Rotation | None = None
    unread: str = "its adapter_config.json, which says how its numbers make rotations, is not there"

    def of(self, kind: str) -> tuple[object, ...]:
        """What decides the arithmetic of a kind and is neither in its tensors nor in its name."""
        if kind.startswith("peft_oft") and self.rotation:
            return (self.rotation.terms, self.rotation.eps, self.rotation.shared)
        return (self.feedforward,) if kind == "peft_ia3" else ()


UNSAID = Settings()


def settings_of(
    document: Mapping[str, object] | None,
    module: str,
    alpha: float | None = None,
    on_input: bool | None = None,
) -> Settings:
    """Of one module, from an ``adapter_config.json`` and the numbers in its file."""
    if document is None:
        return Settings(alpha, on_input)
    kind = str(document.get("peft_type") or "LORA").upper()
    if kind == "IA3":
        return Settings(alpha, on_input, feedforward=_listed(document.get("feedforward_modules"), module))
    if kind == "OFT":
        rotation, unread = _rotation(document)
        return Settings(alpha, on_input, rotation=rotation, unread=unread)
    if kind == "LORA":
        transposed = document.get("fan_in_fan_out") is True
        return Settings(
            alpha,
            on_input,
            transposed=transposed,
            parameters=_parameters(document.get("target_parameters"), module),
        )
    return Settings(alpha, on_input)


def owner(module: str) -> str:
    """The module that has the parameters; PEFT nests a layer into another for each of them."""
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
    return module


def _parameters(targets: object, module: str) -> tuple[str, ...]:
    """As PEFT reads it: a target is a parameter's whole name, or a dotted tail of it."""
    named = (
        [target.rpartition(".") for target in targets if isinstance(target, str)]
        if isinstance(targets, list)
        else []
    )
    tail = f".{owner(module)}"
    return tuple(
        dict.fromkeys(f".{leaf}" for parent, _, leaf in named if not parent or tail.endswith(f".{parent}"))
    )


def _listed(modules: object, name: str) -> bool | None:
    """As PEFT reads it: a regular expression of whole names, or their ends."""
    plain = name.removeprefix("base_model.model.")
    if isinstance(modules, str):
        return _fits(modules, plain)
    if not isinstance(modules, list):
        return None
    return any(isinstance(end, str) and plain.endswith(end) for end in modules)


def _fits(pattern: str, name: str) -> bool | None:
    """None for a pattern that is not matched, which is a fault of its own."""
    try:
        return whole(pattern)(name)
    except BadPattern:
        return None


def _rotation(document: Mapping[str, object]) -> tuple[Rotation | None, str]:
    if "oft_block_size" not in document:
        return None, "it is of PEFT before 0.14, whose OFT was another one"
    neumann, terms = document.get("use_cayley_neumann"), document.get("num_cayley_neumann_terms", 5)
    if neumann and _version(document.get("peft_version")) < NEUMANN_SINCE:
        return None, "it is of PEFT before 0.18, whose Cayley-Neumann series was another one"
    if neumann and (type(terms) is not int or not 1 <= terms <= MAX_TERMS):
        return None, f"num_cayley_neumann_terms is {short(terms)}, no number of terms"
    eps = document.get("eps", 6e-5)
    if document.get("coft") and (not isinstance(eps, (int, float)) or not 0 <= eps < 1 << 31):
        return None, f"eps is {short(eps)}, no number"
    return Rotation(
        terms=int(terms) if neumann else None,  # type: ignore[call-overload]
        eps=float(eps) if document.get("coft") else None,  # type: ignore[arg-type]
        shared=document.get("block_share") is True,
    ), ""


def _version(value: object) -> tuple[int, ...]:
    found = re.match(r"(\d{1,9})\.(\d{1,9})", value) if isinstance(value, str) else None
    return (int(found[1]), int(found[2])) if found else (0, 0)
