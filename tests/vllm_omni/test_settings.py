"""The engine's own names for what a fused folder says of sampling."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import vllm_omni
from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import WAN_SAMPLE_SOLVER_CHOICES

from fuselora.serving_notes import REQUEST_FIELDS, SERVER_OPTIONS, SOLVERS

assert vllm_omni.__file__ is not None
ENGINE = Path(vllm_omni.__file__).parent
# read as text: what they import is no part of this environment
SERVE = (ENGINE / "entrypoints" / "cli" / "serve.py").read_text(encoding="utf-8")
VIDEOS = (ENGINE / "entrypoints" / "openai" / "protocol" / "videos.py").read_text(encoding="utf-8")


def test_solvers_are_those_of_the_wan_pipelines() -> None:
    assert set(WAN_SAMPLE_SOLVER_CHOICES) == SOLVERS


@pytest.mark.parametrize("option", SERVER_OPTIONS.values())
def test_the_server_has_the_option(option: str) -> None:
    assert f'"{option}",' in SERVE


@pytest.mark.parametrize("field", [*REQUEST_FIELDS, "extra_params"])
def test_a_request_for_a_video_has_the_field(field: str) -> None:
    assert re.search(rf"^    {field}: ", VIDEOS, re.MULTILINE)
