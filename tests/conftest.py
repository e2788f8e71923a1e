"""What a run says first about tests that it leaves out, and what it holds against the schema."""

from __future__ import annotations

from importlib.util import find_spec


def pytest_configure() -> None:
    from tests import validated

    validated.install()


def pytest_report_header() -> str | None:
    if find_spec("vllm_omni") is None:
        return "vllm-omni is not installed: tests/vllm_omni runs by `make test-vllm-omni`"
    return None
