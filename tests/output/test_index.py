from __future__ import annotations

import json

from fuselora.output.index import encode_index


def test_the_index_is_spelled_as_diffusers_spells_it() -> None:
    weight_map = {
        "b.weight": "model-00002-of-00002.safetensors",
        "a.weight": "model-00001-of-00002.safetensors",
    }
    assert encode_index(weight_map, 104, {}) == (
        b'{\n  "metadata": {\n    "total_size": 104\n  },\n  "weight_map": {\n'
        b'    "a.weight": "model-00001-of-00002.safetensors",\n'
        b'    "b.weight": "model-00002-of-00002.safetensors"\n  }\n}\n'
    )


def test_the_bases_metadata_is_kept_but_for_the_size() -> None:
    base = {"total_size": 7, "total_parameters": 3, "note": {"by": "ü"}}
    document = json.loads(encode_index({}, 12, base))
    assert document["metadata"] == {"total_size": 12, "total_parameters": 3, "note": {"by": "ü"}}
    assert base["total_size"] == 7
