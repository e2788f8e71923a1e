"""File names that loaders, and we ourselves, act on. Standard library only."""

from __future__ import annotations

import re

# What loaders take for a model's weights, in the model's own folder.
MODEL_ENDINGS = (".safetensors", ".bin", ".pt", ".ckpt", ".gguf")
# The same in any folder. A native Wan folder keeps its text encoder and VAE as .pth beside the model.
WEIGHT_ENDINGS = (*MODEL_ENDINGS, ".pth")
# An index of shards; a variant's is called x.safetensors.index.fp16.json.
_INDEX = re.compile(r".*\.index(\.[^.]+)?\.json", re.DOTALL)
# In the root of a repository, what people write about it and no loader reads.
DOCUMENT_NAMES = ("README", "LICENSE", "LICENCE", "NOTICE")
DOCUMENT_ENDINGS = (".md", ".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".mp4")
# What version control and huggingface_hub keep in a folder for themselves.
PRIVATE_FOLDERS = ("/.git", "/.cache/huggingface")

# Beside OUT: where its files are written, and where an output that is being replaced may stand.
STAGE_ENDING = ".partial"
FORMER_ENDING = ".old"
LOCK_ENDING = ".lock"
# In an OUT that is a mount point: our own folders and lock, and what mkfs leaves in a new ext file system.
STAGE_NAME = "fuselora.partial"
FORMER_NAME = "fuselora.former"
BESIDE = frozenset({STAGE_NAME, f"{STAGE_NAME}.lock", FORMER_NAME, "lost+found"})


def is_reserved(name: str) -> bool:
    """Whether a run whose OUT lies beside a folder of this name, or around it, may take it for its own."""
    return name.endswith((STAGE_ENDING, STAGE_ENDING + LOCK_ENDING)) or name in BESIDE


def is_model_file(name: str) -> bool:
    """Whether a loader could take a file of this name, in a model's folder, for the model's weights."""
    return name.endswith(MODEL_ENDINGS)


def is_loadable(name: str) -> bool:
    """Whether a loader could take a file of this name, in a model's folder, for weights or their index."""
    return is_model_file(name) or is_index(name)


def is_weight_file(name: str) -> bool:
    """Whether a loader could take a file of this name for weights of any component."""
    return name.endswith(WEIGHT_ENDINGS)


def is_weight_or_index(name: str) -> bool:
    """Whether a loader could take a file of this name for weights of any component or their index."""
    return is_weight_file(name) or is_index(name)


def is_index(name: str) -> bool:
    """Whether a file of this name is an index of shards, of any variant."""
    return _INDEX.fullmatch(name) is not None


def is_document(path: str) -> bool:
    """Whether the file at this relative path is about the checkpoint and no part of it."""
    is_in_root = "/" not in path and not is_weight_or_index(path)
    return is_in_root and (
        path == ".gitattributes" or path.startswith(DOCUMENT_NAMES) or path.lower().endswith(DOCUMENT_ENDINGS)
    )


def is_private(path: str) -> bool:
    """Whether the folder at this relative path is no part of the checkpoint."""
    return f"/{path}".endswith(PRIVATE_FOLDERS)
