"""Tiny sizes: the names and every difference of width of the full ones."""

from __future__ import annotations

import pytest

from fuselora.synth import SIZES, base_tensors, tiny
from tests import listings
from tests.synth.names import T2V


@pytest.mark.parametrize("name", sorted(SIZES))
def test_subnormals_keeps_names_and_every_difference_of_width(name: str) -> None:
    full, small = SIZES[name].with_blocks(2), tiny(name)
    assert [s.name for s in base_tensors(small)] == [s.name for s in base_tensors(full)]
    dims = listings.widths(full, small)
    wide = [n for n in dims if n >= 1280]
    assert len({dims[n] for n in wide}) == len(wide)
    assert sum(spec.n_bytes for spec in base_tensors(small)) < 1_000_000


def test_subnormals_models_of_other_sizes_do_not_fit_each_other() -> None:
    assert len({tiny(name).dim for name in (T2V, "wan2.2-ti2v-5b", "wan2.1-t2v-1.3b")}) == 3
