# Every command installs what it needs into VENV; nothing is installed by hand.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=

.PHONY: train test faults lint format bench clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

train: $(READY)  ## Train a byte-level GPT on Python's own standard library (ARGS="--help" lists the options).
	$(BIN)/python examples/train_lm.py $(ARGS)

test: $(READY)  ## Run every test, the doctests and the code blocks of the documentation.
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

faults: $(READY)  ## Kill, crash, fill, flip and fuzz as often as the table of faults says; takes hours.
	FTRAIN_FAULTS=full $(BIN)/python -m pytest tests/faults $(ARGS)

lint: $(READY)  ## Check format, style and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)  ## Rewrite the files as `make lint` wants them.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## Measure a step beside the loops and libraries that it replaces (ARGS="--help" lists the options).
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]' -r bench/peers.txt
	$(BIN)/python -m bench $(ARGS)

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
