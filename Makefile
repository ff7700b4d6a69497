# Every target sets up what it needs by itself (scripts/setup.sh); a second call sets up nothing again.
BIN := .venv/bin
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: ## Python, packages and system libraries (.venv)
	@scripts/setup.sh

demo: setup ## the whole path on a CPU, in minutes; your own data: make demo ARGS="--dataset FOLDER"
	@$(BIN)/drivetrain demo $(ARGS)

test: lint ## lint, then all tests but the slow ones
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: lint ## lint, then every test
	@$(BIN)/python -m pytest $(ARGS)

lint: setup ## ruff, pyright and the import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports

format: setup ## rewrite the code the way lint wants it
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock: setup ## resolve pyproject.toml anew into requirements.lock (keeps pins that still fit)
	@PATH="$$PATH:.tools/bin" uv pip compile pyproject.toml --group dev --generate-hashes --no-header \
		--python-version 3.12 --quiet -o requirements.lock

clean: ## remove what make made: environment, caches, outputs
	rm -rf .venv .tools out build dist .pytest_cache .ruff_cache .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
