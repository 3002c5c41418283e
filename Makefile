# `make demo` shows what cubroker does, without a framework; `make test` checks everything, and takes torch. Both build
# what they need in .venv.
PYTHON ?= python3
VENV ?= .venv
# Tests wait about as long as they compute: four workers keep two cores busy.
WORKERS ?= 4
# So many tests that fail beside others run once more, alone, as in CPython's `regrtest --rerun`; a test fails if it
# fails there again. Both outcomes are printed. More of them than that are not retried.
RETRIED ?= 4
RETRY = echo 'again, alone:' && $(BIN)/coverage run -m pytest --last-failed --last-failed-no-failures none
SEEDS ?= 1000000
KILLS ?= 1000
INPUTS ?= 10000000
DEVICES ?= host:2
BIN := $(VENV)/bin
PACKAGES := api protocol driver server client integrations cli
SOURCES := pyproject.toml README.md LICENSE $(shell find $(PACKAGES) -name '*.py' -o -name '*.ptx' -o -name '*.html' -o -name py.typed)

DIST ?= dist
SBOM ?= $(DIST)/cubroker.cdx.json

.PHONY: help demo test lint types unit long simulate kill restart-test soak fuzz hostile cluster systemd-test engines benchmarks docs lock dist sbom clean

help:
	@echo 'make demo        load weights, share them, kill a worker, publish a second version'
	@echo 'make test        ruff, mypy --strict and pytest with branch coverage'
	@echo 'make lint|types|unit   one of these alone'
	@echo 'make long        all slow tests, and every sweep whole: make test takes a sample of them, which changes daily'
	@echo 'make simulate    SEEDS=$(SEEDS) random histories of the ledger against a naive model'
	@echo 'make kill        KILLS=$(KILLS) workers killed at every step of what a client does'
	@echo 'make restart-test  the broker killed at every step of its, and KILLS=$(KILLS) times under load, under cubroker keep'
	@echo 'make soak        leaks, load and stopped clients'
	@echo 'make fuzz        INPUTS=$(INPUTS) mutated inputs to everything that reads bytes'
	@echo 'make hostile     peers that mean harm, ten times as hard as in make test'
	@echo 'make systemd-test  100 SIGKILLs of a broker under a systemd of its own, and an upgrade (root)'
	@echo 'make cluster     hosts on a network of their own, and every command of docs/cluster.md (root)'
	@echo 'make engines     real engines on emulated devices, under CUBROKER_{VLLM,SGLANG,TRITON}_PYTHON'
	@echo 'make install     systemd units, manual page, completion of shells; PREFIX=$(PREFIX) SYSCONFDIR=$(SYSCONFDIR) DESTDIR=$(DESTDIR)'
	@echo 'make benchmarks  DEVICES=$(DEVICES): the figures of benchmarks/, on this machine'
	@echo 'make docs        the pages and the reference as a site, in dist/docs; a broken link or name is an error'
	@echo 'make lock        requirements/ anew: the newest versions of what the image, the tests and the site are built from'
	@echo 'make dist        $(DIST)/: the source distribution and the wheel, which a clean environment installs and runs'
	@echo 'make sbom        $(SBOM): what is in the image, as CycloneDX'

demo: $(VENV)/demo
	$(BIN)/cubroker demo

test: lint
	$(MAKE) --no-print-directory --jobs=2 types unit

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/test
	$(BIN)/mypy -p cubroker

unit: $(VENV)/test
	$(BIN)/coverage erase
	CUBROKER_TEST_SLOW_PART=12 $(BIN)/coverage run -m pytest -n $(WORKERS) --dist worksteal --maxfail $(RETRIED) || { [ $$? = 1 ] && $(RETRY); }
	@find . -maxdepth 1 -name '.coverage.*' -empty -delete  # of processes that tests killed before they wrote anything
	$(BIN)/coverage combine --quiet
	@rm -f .coverage.*  # of those that they killed while they wrote, which cannot be read
	$(BIN)/coverage report --fail-under=95
	@echo 'protocol and ledger: every branch'
	$(BIN)/coverage report --include='protocol/*,server/ledger/*,server/transport/reply_cache.py' --fail-under=100

long: $(VENV)/test
	CUBROKER_TEST_ALL=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

simulate: $(VENV)/test
	$(BIN)/python -m tests.fuzz.simulation --seeds $(SEEDS) --jobs $(WORKERS)

kill: $(VENV)/test
	$(BIN)/python -m tests.crash.kills --kills $(KILLS)

restart-test: $(VENV)/test
	$(BIN)/python -m tests.crash.restart
	$(BIN)/python -m tests.crash.restart.random_kills --kills $(KILLS)

soak: $(VENV)/test
	$(BIN)/python -m tests.crash.soak leaks
	$(BIN)/python -m tests.crash.soak load
	$(BIN)/python -m tests.crash.soak stopped_clients

fuzz: $(VENV)/test
	$(BIN)/python -m tests.fuzz --inputs $(INPUTS) --jobs $(WORKERS)

# Boundaries whose tests lie with what they are tests of: docs/security.md names them.
BOUNDARIES = $(shell grep -oE 'tests/unit/[a-z_/]+\.py' docs/security.md | sort -u)

hostile: $(VENV)/test
	CUBROKER_HOSTILITY=10 $(BIN)/python -m pytest tests/integration/hostile $(BOUNDARIES) --timeout 1200

cluster: $(VENV)/test
	CUBROKER_TEST_ALL=1 $(BIN)/python -m pytest tests/integration/test_cluster.py tests/systemd/test_cluster.py \
		tests/unit/integrations/cluster --timeout 600

systemd-test: $(VENV)/test
	CUBROKER_SYSTEMD_KILLS=100 $(BIN)/python -m pytest tests/systemd --timeout 1800

# Engines have requirements of their own: each variable names an interpreter that has one, with cubroker's dependencies.
engines: $(VENV)/test
	$(BIN)/python -m pytest tests/engines -rs

benchmarks: $(VENV)/test
	$(BIN)/python -m benchmarks --devices $(DEVICES)

docs: $(VENV)/docs
	$(BIN)/python docs/tools/assemble.py build/docs/pages
	$(BIN)/zensical build --clean --strict

# What requirements/ fixes, by version and hash: image.txt what the image runs, build.txt what builds the wheel,
# test.txt what the tests need, but for torch, docs.txt what the site needs, in the same versions. uv asks its default
# index, so that the hashes are those that every machine finds.
LOCK := $(BIN)/uv pip compile --quiet --upgrade --generate-hashes \
	--custom-compile-command 'make lock'

lock: $(VENV)/python
	$(BIN)/pip install --quiet --upgrade uv
	$(LOCK) --python-version 3.12 --python-platform linux --extra server --extra cli pyproject.toml \
		--output-file requirements/image.txt
	echo 'setuptools>=77' | $(LOCK) --universal --python-version 3.11 - --output-file requirements/build.txt
	echo torch | $(LOCK) --universal --python-version 3.11 --extra test --excludes /dev/stdin pyproject.toml \
		--output-file requirements/test.txt
	$(LOCK) --universal --python-version 3.11 --extra docs --constraint requirements/test.txt pyproject.toml \
		--output-file requirements/docs.txt

# The wheel is built from the source distribution, so that has all that it takes; then the demo is played with the wheel,
# in an environment that has nothing else, out of the tree's sight.
dist: $(VENV)/python
	rm -rf build '$(DIST)'/cubroker-*.tar.gz '$(DIST)'/cubroker-*.whl
	$(BIN)/pip install --quiet --require-hashes --no-deps --requirement requirements/build.txt
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("$(DIST)")' >/dev/null
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir '$(DIST)' '$(DIST)'/cubroker-*.tar.gz
	@set -e; place=$$(mktemp -d); trap 'rm -rf "$$place"' EXIT; wheel=$$(realpath '$(DIST)'/cubroker-*.whl); \
		$(PYTHON) -m venv "$$place/venv"; "$$place/venv/bin/pip" install --quiet "$$wheel[server,cli]"; \
		cd "$$place"; venv/bin/cubroker --version; venv/bin/cubroker demo
	@ls '$(DIST)'/cubroker-*

sbom: $(VENV)/test
	@mkdir -p $(dir $(SBOM))
	$(BIN)/python -m cyclonedx_py requirements --pyproject pyproject.toml --mc-type application --output-reproducible \
		--output-file $(SBOM) requirements/image.txt

clean:
	rm -rf $(VENV) build $(DIST) .cache *.egg-info .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A wheel is built and installed, as a user would have it; `build` would keep files that are gone from the tree.
$(VENV)/demo: $(VENV)/python $(SOURCES)
	@rm -rf build
	$(BIN)/pip install --disable-pip-version-check --upgrade '.[server,cli]'
	@rm -rf build *.egg-info
	@touch $@

# torch is held to a version and to no hash, since its wheels for CPUs and for each CUDA have indexes of their own; what
# only torch needs is held to neither.
$(VENV)/test: $(VENV)/locked $(SOURCES)
	rm -rf build
	$(BIN)/pip install --quiet --upgrade --no-build-isolation '.[test]'
	[ -d .mypy_cache ] || $(BIN)/mypy -c '$(TYPED)' >/dev/null
	@touch $@

# mypy reads these libraries once, which takes four times as long as to check what uses them.
TYPED := import msgspec, numpy, rich, torch, zmq

# The reference is made of the installed package, and the help of the commands by calling them.
$(VENV)/docs: $(VENV)/python requirements/docs.txt $(SOURCES)
	rm -rf build
	$(BIN)/pip install --quiet --require-hashes --no-deps --requirement requirements/docs.txt
	$(BIN)/pip install --quiet --upgrade '.[docs]'
	@touch $@

$(VENV)/locked: $(VENV)/python requirements/test.txt
	$(BIN)/pip install --quiet --require-hashes --no-deps --requirement requirements/test.txt
	@touch $@

$(VENV)/python:
	$(PYTHON) -m venv $(VENV)
	@touch $@

include deploy/install.mk
