# Every target makes its own environment in .venv; nothing else needs to be installed first.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST_ARGS ?=
REAL_ARGS ?=

# What `make check` runs of the tests: something of every part, and under a minute together.
QUICK := tests/test_imports.py tests/test_mlx_lm_contract.py \
  $(addprefix tests/eagle_mlx/,test_cache.py test_sampling.py test_seeds.py test_text.py test_tree.py) \
  $(addprefix tests/data_pipelines/,test_rendering.py test_conversation.py test_filters.py) \
  $(addprefix tests/train/,test_config.py test_losses.py test_schedule.py) \
  $(addprefix tests/serve/,test_prompts.py test_speculation.py)

# Each process of the tests would compile all modules again where the environment forbids to keep what is compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help model demo real test test-full check quick docs format blas clean

help:
	@echo 'make model      fetch a real model of 135 M parameters, whose head is included (out/real)'
	@echo 'make demo       train an EAGLE-3 head for a few minutes, decode with it, show a table and pictures (out/demo)'
	@echo 'make real       decode questions with the real model in every way, show it (out/real)'
	@echo 'make test       run the tests'
	@echo 'make test-full  run them with all combinations, seeds and examples; EAGLE_FULL=1 pytest FILE does so for one file'
	@echo 'make check      run the linter, the format check, the type check and the quick tests'
	@echo 'make docs       build the documentation as a site (build/site)'
	@echo 'make format     write the code in the project'\''s format'
	@echo 'make clean      remove .venv, caches and out/'

model: $(READY) blas
	@$(BIN)/python checkpoints/scripts/make_real_model.py --output out/real

demo: $(READY) blas
	@$(BIN)/python checkpoints/scripts/demo.py --output out/demo

real: $(READY) blas
	@$(BIN)/python checkpoints/scripts/real.py --output out/real $(REAL_ARGS)

test: $(READY) blas
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

test-full: export EAGLE_FULL = 1
test-full: test

# The type checker follows files, not installation maps: it sees the applications through links in build/typed.
check: $(READY) blas
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf build/typed && mkdir -p build/typed/eagle_mlx
	@cd build/typed/eagle_mlx && ln -s ../../../eagle_mlx/* ../../../train ../../../serve ../../../data_pipelines .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks/*.py
	$(BIN)/mypy examples/*.py
	@$(MAKE) --no-print-directory quick

quick: $(READY) blas
	$(BIN)/python -m pytest -n 2 --dist worksteal $(QUICK)

# The pages are laid out as in the repository, so that links work in both.
docs: $(READY)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[docs]'
	@rm -rf build/pages && mkdir -p build/pages
	@git ls-files '*.md' '*.jsonl' docs examples benchmarks/results CITATION.cff LICENSE | grep -v '^\.github' | tar -cf - -T - | tar -xf - -C build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build out .mypy_cache .ruff_cache .pytest_cache .hypothesis eagle_mlx.egg-info

$(READY): pyproject.toml
	@if $(BIN)/python -c 'import pip' 2>/dev/null; then exit 0; fi; \
	python=''; \
	for name in python3.11 python3.12 python3.13 python3; do \
	  if $$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then \
	    python=$$name; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo 'error: no Python 3.11, 3.12 or 3.13 found. Install one: apt-get install python3 (Debian 12 or later),' >&2; \
	  echo '       brew install python@3.12 (macOS), or https://www.python.org/downloads/' >&2; \
	  exit 1; \
	fi; \
	if ! $$python -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "error: $$python cannot make virtual environments. Type: apt-get install $$python-venv" >&2; \
	  exit 1; \
	fi; \
	echo "making $(VENV) with $$($$python --version)"; \
	$$python -m venv --clear $(VENV)
	@echo 'installing the project and what it needs, about 1 GB'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --upgrade pip
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	@# What the tests of images need of the extra `vision`, without its packages for video and sound.
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps 'mlx-vlm>=0.7.10,<0.8'
	@touch $(READY)

# On Linux the wheel's own BLAS is about 40 times slower than OpenBLAS; without root this says what to type and goes on.
# Which of OpenBLAS and BLIS is faster depends on the processor (docs/install.md).
blas: $(READY)
	@if [ "$$(uname -s)" != Linux ] || [ -n "$$EAGLE_MLX_BLAS" ]; then exit 0; fi; \
	found='import ctypes; ctypes.CDLL("libopenblas.so.0")'; \
	if $(BIN)/python -c "$$found" 2>/dev/null; then exit 0; fi; \
	as=none; \
	if [ "$$(id -u)" = 0 ]; then as=''; elif sudo -n true 2>/dev/null; then as='sudo -n'; fi; \
	if [ "$$as" != none ] && command -v apt-get >/dev/null; then \
	  echo 'installing libopenblas0-pthread and libblis4-openmp, fast BLAS libraries'; \
	  install="$$as env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libopenblas0-pthread"; \
	  $$install >/dev/null 2>&1 || { $$as apt-get update -qq && $$install; } >/dev/null 2>&1 || true; \
	  $$install libblis4-openmp >/dev/null 2>&1 || true; \
	fi; \
	if ! $(BIN)/python -c "$$found" 2>/dev/null; then \
	  echo 'note: OpenBLAS is missing, so everything runs, slowly. To fix it, type:'; \
	  echo '        sudo apt-get install libopenblas0-pthread     (Debian, Ubuntu)'; \
	  echo '        sudo dnf install openblas-threads             (Fedora)'; \
	fi
