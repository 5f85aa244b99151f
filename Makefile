# Every target makes its own environment first; on a fresh machine nothing else is typed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types bench proto clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Magnetar needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[spark,avro,demo,bench,dev]'
	touch $@

demo: $(STAMP)
	@$(BIN)/python -m magnetar.cli.main demo

test: $(STAMP)
	$(BIN)/python -m tests.java
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/python -m ruff check .

# The repository is the package `magnetar`, whatever its folder is called; mypy sees it through a link of that name.
types: $(STAMP)
	mkdir -p $(VENV)/house && ln -sfn ../.. $(VENV)/house/magnetar
	cd $(VENV)/house && MYPYPATH=. ../bin/python -m mypy --config-file magnetar/pyproject.toml --cache-dir ../.mypy_cache \
		-p magnetar.proto -p magnetar.runtime -p magnetar.metadata -p magnetar.bookie -p magnetar.broker \
		-p magnetar.client -p magnetar.cli -p magnetar.spark_connector

bench: $(STAMP)
	$(BIN)/python -m benchmarks all

proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -Imagnetar/proto=proto --python_out=$(VENV) --pyi_out=$(VENV) \
		magnetar/proto/entry.proto magnetar/proto/wire.proto
	cp $(VENV)/magnetar/proto/*_pb2.py $(VENV)/magnetar/proto/*_pb2.pyi proto/

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
