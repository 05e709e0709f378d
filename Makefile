# The plain commands behind each target, for machines without make, stand in README.md.
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: demo test lint
demo: .venv/main
	$(PY) prepare_data.py --vocab_size 4096
	$(PY) train.py config/demo.py
	$(PY) -m tools.evaluate checkpoints/demo --data data/python_stdlib
	$(PY) generate.py --checkpoint checkpoints/demo --prompt "def " --max_new_tokens 120 --seed 1

test: .venv/dev
	$(PY) -m pytest -n 2

lint: .venv/dev
	.venv/bin/ruff check .

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "this needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv

.venv/main: .venv/bin/python requirements.txt constraints.txt
	$(PY) -m pip install --quiet -r requirements.txt -c constraints.txt
	touch $@

.venv/dev: .venv/main requirements-dev.txt
	$(PY) -m pip install --quiet -r requirements-dev.txt -c constraints.txt
	touch $@
