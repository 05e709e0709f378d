# The plain commands behind each target, for machines without make, stand in README.md.
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: demo test lint gpu
demo: .venv/main
	$(PY) prepare_data.py --vocab_size 4096
	$(PY) train.py config/demo.py
	$(PY) -m tools.evaluate checkpoints/demo --data data/python_stdlib
	$(PY) generate.py --checkpoint checkpoints/demo --prompt "def " --max_new_tokens 120 --seed 1

test: .venv/dev .venv/llama_cpp
	$(PY) -m pytest -n 2

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

# Every check and measurement that a GPU is needed for. NANOGPT=PATH: a checkout to compare with;
# PY=python3: what is installed, without .venv
PACKAGES = $$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
gpu: $(if $(filter .venv/%,$(PY)),.venv/dev)
	$(PY) -m pytest -m gpu
	$(PY) prepare_data.py "$(PACKAGES)/**/*.py" --clean --out data/packages
	$(PY) -m benchmarks.throughput $(if $(NANOGPT),--nanogpt $(NANOGPT)) --data_dir=data/packages --name throughput_134m
	$(PY) -m benchmarks.ladder --data_dir=data/packages
	$(PY) -m benchmarks.time_to_loss --task gpt2_small --seeds 1 --data_dir=data/packages
	$(PY) -m benchmarks.generate $(if $(NANOGPT),--nanogpt $(NANOGPT))
	$(PY) -m benchmarks.startup --preset config/gpt2_small.py --data_dir=data/packages
	$(PY) -m benchmarks.plan --data data/packages --micro 16 32 64
	$(PY) -m benchmarks.save_pause

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "this needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv

.venv/main: .venv/bin/python requirements.txt constraints.txt
	$(PY) -m pip install --quiet -r requirements.txt -c constraints.txt
	touch $@

.venv/dev: .venv/main requirements-dev.txt
	$(PY) -m pip install --quiet -r requirements-dev.txt -c constraints.txt
	touch $@

# Real llama.cpp, to run exported models in tests; where npm is missing, these tests are skipped.
.venv/llama_cpp: .venv/bin/python $(wildcard tests/llama_cpp/*)
	mkdir -p $@ && cp tests/llama_cpp/* $@
	npm install --prefix $@ --omit=optional --ignore-scripts --no-package-lock --no-audit --no-fund --silent \
		|| echo "llama.cpp is not installed: tests that run it are skipped"
	touch $@
