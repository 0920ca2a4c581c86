# Start with `make demo` or `make test`; both set up the environment first.
PY := .venv/bin/python
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
# Test processes: two keep two cores busy; together with what they start they take 7.3 GiB of memory.
WORKERS ?= 2
PYTEST = $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=20 -rs

.PHONY: setup demo test test-full lint format docs

setup:
	@./scripts/setup.sh

demo: setup
	@$(PY) -m examples.searchr1.tiny.demo $(ARGS)

test: setup lint
	@$(PYTEST) -m "not slow" $(ARGS)

test-full: setup
	@$(PYTEST) -m slow --hypothesis-profile=random $(ARGS)

lint: setup
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy

format: setup
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

docs: setup
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict
	@echo "The documents are in build/site. To preview changes while writing, run .venv/bin/mkdocs serve."
