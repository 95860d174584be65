PYTHON ?= python3
BIN := .venv/bin
# What is passed on, as in: make demo ARGS="--pair qwen3-8b --port 9000", make test ARGS="-m 'not engines' -x"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup setup-test demo test lint format clean screenshots bench doctor

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  Options for the command behind a target: ARGS="…"'

setup: ## install everything into .venv: vLLM for this machine, and its model without a GPU
	@$(PYTHON) -m app.bootstrap

setup-test: ## the same, with what the tests need (Chromium by apt, where that is allowed)
	@$(PYTHON) -m app.bootstrap --extra test --chromium

demo: setup ## set up if needed, start both engines and the page, print its URL
	@$(BIN)/specduel serve $(ARGS)

doctor: setup ## check whether the demo would start here
	@$(BIN)/specduel doctor $(ARGS)

test: setup-test ## the whole test suite: unit tests, two real engines, a real browser
	@$(BIN)/python -m pytest $(ARGS)

lint: ## ruff and mypy
	@$(PYTHON) -m app.bootstrap --extra test --extra lint --no-models
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy

format: ## let ruff format the code
	@$(PYTHON) -m app.bootstrap --extra test --extra lint --no-models
	@$(BIN)/python -m ruff check --fix .
	@$(BIN)/python -m ruff format .

screenshots: setup-test ## take the README's screenshots from a real run, while `make demo` runs
	@$(BIN)/python -m app.screenshots $(ARGS)

bench: setup ## compare the app's throughput with a bare engine's
	@$(BIN)/specduel bench $(ARGS)

clean: ## remove the environment and everything made by the tools; built models stay
	rm -rf .venv .cache build dist test-results .pytest_cache .ruff_cache .mypy_cache *.egg-info
	find app tests -name __pycache__ -type d -prune -exec rm -rf {} +
