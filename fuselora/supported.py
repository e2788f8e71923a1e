"""What ``fuselora families`` says, from the families' own data. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuselora.families import FAMILIES

if TYPE_CHECKING:
    from fuselora.families import Family, FewStep


@dataclass(frozen=True, slots=True)
class Supported:
    """One family. ``to_tell`` are layouts that share their names with another, and what tells them apart."""

    family: str
    models: tuple[str, ...]
    layouts: tuple[str, ...]
    to_tell: Mapping[str, str]
    few_step: tuple[FewStep, ...]

    def document(self) -> dict[str, object]:
        return {
            "family": self.family,
            "models": list(self.models),
            "layouts": list(self.layouts),
            "layouts_to_tell": dict(self.to_tell),
            "few_step": [_few_step(row) for row in self.few_step],
        }


def supported() -> tuple[Supported, ...]:
    """Every family, in the order in which they were added."""
    return tuple(
        Supported(family.name, _models(family), family.all_layouts, _to_tell(family), family.few_step)
        for family in FAMILIES
    )


def _models(family: Family) -> tuple[str, ...]:
    """Published models, each once; two experts are one."""
    return tuple(dict.fromkeys(name for kin in family.kin for name in (*kin.models, *kin.expert_of)))


def _to_tell(family: Family) -> dict[str, str]:
    """The layouts that only a sign, or the user, tells from the first one."""
    return {sign.layout: sign.says for sign in family.signs}


def _few_step(row: FewStep) -> dict[str, object]:
    settings = {
        "num_inference_steps": row.num_inference_steps,
        "guidance_scale": row.guidance_scale,
        "flow_shift": row.flow_shift,
        "solver": row.solver,
        "remark": row.remark,
        "alpha": row.alpha,
    }
    told = {name: value for name, value in settings.items() if value is not None}
    return {"name": row.name, "source": row.source, **told}
