"""The index of a sharded component. Standard library only."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def encode_index(
    weight_map: Mapping[str, str], total_size: int, base_metadata: Mapping[str, object]
) -> bytes:
    """The bytes of ``*.safetensors.index.json`` as diffusers and transformers write it.

    ``weight_map`` gives each tensor's file; ``total_size`` is the sum of the tensors' bytes, headers
    not counted; what else the base's index says in ``metadata`` is kept.
    """
    metadata = {**base_metadata, "total_size": total_size}
    document = {"metadata": metadata, "weight_map": dict(weight_map)}
    return json.dumps(document, indent=2, sort_keys=True).encode("ascii") + b"\n"
