# `make demo` shows what cubroker does; `make test` checks everything. Both build what they need in .venv.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
SEEDS ?= 1000000
KILLS ?= 1000
INPUTS ?= 10000000
DEVICES ?= host:2
BIN := $(VENV)/bin
PACKAGES := protocol driver server client cli
SOURCES := pyproject.toml README.md LICENSE $(shell find $(PACKAGES) -name '*.py' -o -name '*.ptx' -o -name '*.html' -o -name py.typed)

.PHONY: help demo test lint types unit simulate kill restart-test soak fuzz hostile systemd-test benchmarks clean

help:
	@echo 'make demo        load real weights, share them, kill a worker, publish a second version'
	@echo 'make test        ruff, mypy --strict and pytest with branch coverage'
	@echo 'make lint|types|unit   one of these alone'
	@echo 'make simulate    SEEDS=$(SEEDS) random histories of the ledger against a naive model'
	@echo 'make kill        KILLS=$(KILLS) workers killed at every step of what a client does'
	@echo 'make restart-test  the broker killed at every step of its, and KILLS=$(KILLS) times under load, under cubroker keep'
	@echo 'make soak        leaks, load and stopped clients'
	@echo 'make fuzz        INPUTS=$(INPUTS) mutated inputs to everything that reads bytes'
	@echo 'make hostile     peers that mean harm, ten times as hard as in make test'
	@echo 'make systemd-test  100 SIGKILLs of a broker under a systemd of its own, and an upgrade (root)'
	@echo 'make install     the systemd units, PREFIX=$(PREFIX) SYSCONFDIR=$(SYSCONFDIR) DESTDIR=$(DESTDIR)'
	@echo 'make benchmarks  DEVICES=$(DEVICES): the figures of benchmarks/, on this machine'

demo: $(VENV)/demo
	$(BIN)/cubroker demo

test: lint types unit

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/test
	$(BIN)/mypy $(addprefix -p cubroker.,$(PACKAGES))

unit: $(VENV)/test
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(WORKERS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --fail-under=95
	@echo 'protocol and ledger: every branch'
	$(BIN)/coverage report --include='protocol/*,server/ledger/*,server/answers.py' --fail-under=100

simulate: $(VENV)/test
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs $(WORKERS)

kill: $(VENV)/test
	$(BIN)/python -m tests.kills --kills $(KILLS)

restart-test: $(VENV)/test
	$(BIN)/python -m tests.restart
	$(BIN)/python -m tests.restart.storm --kills $(KILLS)

soak: $(VENV)/test
	$(BIN)/python -m tests.soak leaks
	$(BIN)/python -m tests.soak load
	$(BIN)/python -m tests.soak stops

fuzz: $(VENV)/test
	$(BIN)/python -m tests.fuzz --inputs $(INPUTS) --jobs $(WORKERS)

hostile: $(VENV)/test
	CUBROKER_HOSTILITY=10 $(BIN)/python -m pytest tests/hostile --timeout 1200

systemd-test: $(VENV)/test
	CUBROKER_SYSTEMD_KILLS=100 $(BIN)/python -m pytest tests/systemd --timeout 1800

benchmarks: $(VENV)/test
	$(BIN)/python -m benchmarks --devices $(DEVICES)

clean:
	rm -rf $(VENV) build *.egg-info .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A wheel is built and installed, as a user would have it; `build` would keep files that are gone from the tree.
$(VENV)/demo: $(VENV)/python $(SOURCES)
	rm -rf build
	$(BIN)/pip install --quiet --upgrade '.[demo]'
	@touch $@

$(VENV)/test: $(VENV)/python $(SOURCES)
	rm -rf build
	$(BIN)/pip install --quiet --upgrade '.[test]'
	@touch $@

$(VENV)/python:
	$(PYTHON) -m venv $(VENV)
	@touch $@

include deploy/install.mk
