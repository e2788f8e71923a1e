"""On which model a LoRA says that it was trained.

The ``ss_`` keys are those of kohya's trainers and of those that follow them, the other one is of Stability
AI's ModelSpec; PEFT's configurations name the model's repository or path. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping

from fuselora.lora.config import Document

METADATA_KEYS = ("ss_base_model_version", "modelspec.architecture", "ss_sd_model_name")
CONFIG_KEY = "base_model_name_or_path"


def trained_on(
    metadata: Mapping[str, str], where: str, documents: Mapping[str, Document]
) -> Mapping[str, str]:
    """Where it says so -> what it says; ``where`` is what the configurations ``documents`` stand in."""
    found = {key: metadata[key] for key in METADATA_KEYS if metadata.get(key)}
    for document in documents.values():
        said = document.get(CONFIG_KEY)
        if isinstance(said, str) and said:
            found[f"{CONFIG_KEY} in {where}"] = said
    return found
