"""Which family tensors belong to, told from their names, and where those say too little from their shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fuselora.families import FAMILIES
from fuselora.families.family import forms_of

if TYPE_CHECKING:
    from fuselora.families import Family
    from fuselora.families.pattern import Shapes

NAME_CHARS = 1000  # of a path, its end
LEAST_SHARE = 0.5  # of names: a variant may have as many of its own, another model has fewer in common


def families_of(names: Iterable[str]) -> tuple[Family, ...]:
    """The families that have most of these tensor or module names, in any layout; several where as many."""
    forms = forms_of(names)
    shares = {family.name: family.share_of(forms) for family in FAMILIES}
    most = max(shares.values())
    return tuple(family for family in FAMILIES if shares[family.name] == most > LEAST_SHARE)


def family_of(shapes: Shapes) -> Family | None:
    """The family of a checkpoint: of several with these names, one with a published model of these shapes."""
    found = families_of(shapes)
    if len(found) < 2:
        return found[0] if found else None
    return next((family for family in found if family.models_of(shapes)), found[0])


def families_named(text: str) -> tuple[Family, ...]:
    """The families that a name, an address or a path speaks of: by the last part of it that names any."""
    parts = re.split(r"[/\\]", text[-NAME_CHARS:])
    found = (tuple(family for family in FAMILIES if family.is_named(part)) for part in reversed(parts))
    return next(filter(None, found), ())
