# Two commands do everything on a fresh machine with Python 3.10 or newer: `make demo` and `make test`.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
	if $$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; \
	then echo $$p; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
TESTS ?= tests
DEMO ?= fuselora-demo

AUDIT_VENV := .venv-audit

OMNI := tests/vllm_omni
OMNI_VENV := .venv-vllm-omni
OMNI_PINS := $(OMNI)/constraints.txt $(OMNI)/requirements.txt
OMNI_STAMP := $(OMNI_VENV)/.installed-$(shell cat pyproject.toml $(OMNI_PINS) | cksum | cut -d' ' -f1)
OMNI_PIP := $(OMNI_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(OMNI)/constraints.txt

# under five minutes on two busy cores; `scripts/bench.py` says what the full run is
BENCH ?= --gigabytes 1 --cases bf16+1xbf16,f32+1xbf16 --rounds 3 --float32-rounds 1 \
	--peer-cases bf16+1xbf16 --peer-rounds 1

.PHONY: demo test test-fast test-vllm-omni crash fuzz mutants audit bench lint format clean

demo: $(STAMP)  ## make a tiny Wan2.2 pair, merge it, verify it
	$(BIN)/fuselora demo $(DEMO)

test: $(STAMP)  ## all tests, the slow ones too
	$(BIN)/pytest --numprocesses auto $(TESTS)

test-fast: $(STAMP)  ## without the slow ones
	$(BIN)/pytest --numprocesses auto -m "not slow" $(TESTS)

test-vllm-omni: $(OMNI_STAMP)  ## against vLLM-Omni's own classes on the CPU; an environment of its own (2.5 GB)
	$(OMNI_VENV)/bin/pytest $(OMNI)

crash: $(STAMP)  ## a merge cut short at every call that writes, some 5,500 times
	$(BIN)/python -m tests.crash

fuzz: $(STAMP)  ## broken files of each kind that is read, ten minutes of new ones
	$(BIN)/python -m tests.fuzz

mutants: $(STAMP)  ## the code broken on purpose in some fifty places: a test has to fail for each
	$(BIN)/python -m tests.mutants

audit: $(STAMP)  ## known vulnerabilities of what is installed; pip-audit has an environment of its own
	test -x $(AUDIT_VENV)/bin/pip-audit || { $(BIN)/python -m venv $(AUDIT_VENV) && $(AUDIT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit; }
	$(BIN)/python -m pip freeze --exclude-editable | sed 's|+cpu$$||' > $(AUDIT_VENV)/installed.txt
	$(AUDIT_VENV)/bin/pip-audit --strict --no-deps --disable-pip --requirement $(AUDIT_VENV)/installed.txt

bench: $(STAMP)  ## time and memory beside `cp` and other tools
	$(BIN)/python scripts/bench.py --work build $(BENCH)

lint: $(STAMP)  ## what CI and pre-commit check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OMNI_VENV) $(AUDIT_VENV) $(DEMO) build *.egg-info

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "fuselora needs Python 3.10 to 3.13" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,lint]"
	@rm -f $(VENV)/.installed-*
	@touch $@

# without --no-deps these bring CUDA's torch, torchvision, triton and gigabytes of kernels
$(OMNI_STAMP): pyproject.toml $(OMNI_PINS)
	@test -n "$(PYTHON)" || { echo "fuselora needs Python 3.10 to 3.13" >&2; exit 1; }
	test -x $(OMNI_VENV)/bin/python || $(PYTHON) -m venv $(OMNI_VENV)
	$(OMNI_PIP) torch
	$(OMNI_PIP) --requirement $(OMNI)/requirements.txt
	$(OMNI_PIP) --no-deps vllm vllm-omni xgrammar --editable .
	@rm -f $(OMNI_VENV)/.installed-*
	@touch $@
