"""Configs against the published ones."""

from __future__ import annotations

import pytest

from fuselora import synth
from fuselora.synth import SIZES
from tests import listings
from tests.synth.names import LISTED


@pytest.mark.parametrize("name", LISTED)
def test_config_is_the_published_one(name: str) -> None:
    published = listings.config(name)
    assert synth.config(SIZES[name]) | {"_diffusers_version": ""} == published | {"_diffusers_version": ""}


def test_native_vace_config() -> None:
    config = synth.native_config(SIZES["wan2.1-vace-14b"])
    assert (config["model_type"], config["vace_layers"]) == ("vace", [0, 5, 10, 15, 20, 25, 30, 35])
