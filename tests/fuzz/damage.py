"""Ways to break bytes, and JSON in particular: one place in it becomes something else."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 0.5, 1e400, float("nan"), 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**400,
    "", "..", "../x", "/etc/passwd", "a\0b", "\x1b[31m", "\u202e", "\ud800", "x" * 2000, "1e999", "nan",
    "(a+)+$", "(",
    [], [[]], {}, {"": None}, [0] * 70, [1, 2, 3], {"a": {"b": []}}, ["x", "x"],
)  # fmt: skip
Place = tuple[Any, Any]  # a list or an object, and a key in it


def damaged(chance: random.Random, content: bytes) -> bytes:
    """One to three changes of single bytes, runs of them, and lengths."""
    found = bytearray(content)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(found) + 1)
        match chance.randrange(5):
            case 0 if found:
                found[at % len(found)] ^= 1 << chance.randrange(8)
            case 1:
                del found[at : at + chance.randint(1, 40)]
            case 2:
                found[at:at] = chance.randbytes(chance.randint(1, 8))
            case 3:
                found[at:at] = found[at : at + chance.randint(1, 60)]
            case _:
                found = found[:at]
    return bytes(found)


def damaged_json(chance: random.Random, text: bytes) -> bytes:
    """One to three places replaced, dropped, renamed, moved or doubled; written as JSON again."""
    document = json.loads(text)
    for _ in range(chance.randint(1, 3)):
        places = [*_places(document)]
        if not places:
            break
        _change(chance, *chance.choice(places), places)
    return json.dumps(document, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")


def reshaped(chance: random.Random, content: bytes) -> bytes:
    """A sound header in which some tensors have other shapes of as many elements, or each other's names."""
    n_bytes = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + n_bytes])
    names = [name for name in header if name != "__metadata__"]
    for _ in range(chance.randint(1, 4)):
        one, two = chance.choice(names), chance.choice(names)
        if chance.random() < 0.3:
            header[one], header[two] = header[two], header[one]
        else:
            header[one]["shape"] = _shape_of(chance, header[one]["shape"])
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + n_bytes :]


def _shape_of(chance: random.Random, shape: list[int]) -> list[int]:
    """Another shape of as many elements."""
    whole = math.prod(shape)
    flat = [] if whole == 1 else [whole]
    return chance.choice([flat, [whole], [1, *shape], [*shape, 1], shape[::-1], [1, whole], [whole, 1, 1, 1]])


def damaged_header(chance: random.Random, content: bytes) -> bytes:
    """The JSON of a safetensors header, with its length right or wrong."""
    n_bytes = struct.unpack("<Q", content[:8])[0]
    header = damaged_json(chance, content[8 : 8 + n_bytes])
    if chance.random() < 0.5:
        header = header.ljust(-(-len(header) // 8) * 8)
    stated = chance.choice([len(header)] * 6 + [0, 1, len(header) - 1, len(header) + 9, 2**63, 2**64 - 1])
    return struct.pack("<Q", stated) + header + content[8 + n_bytes :]


def damaged_lines(chance: random.Random, content: bytes) -> bytes:
    """One of several lines of JSON, or their order."""
    lines = content.splitlines(keepends=True)
    at = chance.randrange(len(lines))
    if chance.random() < 0.2:
        chance.shuffle(lines)
    else:
        lines[at] = damaged_json(chance, lines[at]) + b"\n"
    return b"".join(lines)


def _places(value: Any) -> Iterator[Place]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _change(chance: random.Random, home: Any, key: Any, places: list[Place]) -> None:
    match chance.randrange(6):
        case 0 if isinstance(home, dict):
            del home[key]
        case 1 if isinstance(home, dict):
            home[str(chance.choice(NASTY[:-8]))[:3000]] = home[key]
        case 2:
            other, name = chance.choice(places)
            home[key] = deepcopy(other[name])
        case 3 if isinstance(home[key], str):
            home[key] = _spoiled(chance, home[key])
        case 4 if type(home[key]) is int:
            home[key] += chance.choice([-1, 1, 8, 2**32])
        case _:
            home[key] = deepcopy(chance.choice(NASTY))


def _spoiled(chance: random.Random, text: str) -> str:
    changes: tuple[Callable[[str], str], ...] = (
        str.upper,
        lambda t: t + "\n",
        lambda t: t[1:],
        lambda t: f"../{t}",
    )
    return chance.choice(changes)(text)
