# Each target works from a fresh clone on a machine with Python >= 3.11, make and a C++ compiler.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all browser-test lint lossless curve tsan notebooks cluster gpu-test sanitize bench measure tables docs clean
.DEFAULT_GOAL := demo

demo: .venv/with-cli  ## decode a built-in prompt three ways and compare them
	$(BIN)/ddtree decode

PROPERTIES := tests/tree_build tests/tree_attention tests/tree_accept
PYTEST := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal

test: .venv/with-test  ## the tests of the package, without a GPU
	$(PYTEST) -m "not slow"

test-all: .venv/with-test  ## and the slow ones: nested sanitizers, planted faults, all architectures, notebooks
	$(PYTEST)
	HYPOTHESIS_PROFILE=dev $(PYTEST) -m "not slow" $(PROPERTIES)  # drawn anew each time, unlike the `ci` profile

browser-test: .venv/with-test .venv/with-browser  ## pages in a headless Chromium; skipped where there is none
	$(BIN)/python -m pytest -q -rs -m browser tests/browser

lint: .venv/with-lint .venv/with-test  ## style, docstrings, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/numpydoc lint ddtree_cupy/*/api.py ddtree_cupy/containers/base.py ddtree_cupy/containers/cache.py \
		ddtree_cupy/containers/tree.py ddtree_cupy/decode/generate.py ddtree_cupy/explore/[a-z]*.py \
		ddtree_cupy/interop/[a-z]*.py

lossless: .venv/with-cli  ## 100 held-out prompts x 128 bytes: text identical to autoregressive decoding
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m ddtree_cupy.decode.evaluate lossless

curve: .venv/with-cli  ## tokens per target pass over the budget, on held-out text
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m ddtree_cupy.decode.evaluate curve

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/with-%: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[$*]'
	touch $@

tsan: .venv/with-test  ## emulated kernels under ThreadSanitizer
	env $$($(BIN)/python -m ddtree_cupy.emulate tsan) HYPOTHESIS_PROFILE=sanitize \
		$(BIN)/python -m pytest -q -m emulate -k kernels tests/tree_build tests/tree_attention tests/tree_accept

notebooks: .venv/with-test .venv/with-notebook  ## run every notebook from top to bottom
	$(BIN)/python -m pytest -q -n auto -m notebook tests/docs

cluster: .venv/with-test .venv/with-cluster  ## a sweep on a local Dask cluster
	$(BIN)/python -m pytest -q -m cluster tests/explore

gpu-test: .venv/with-test .venv/with-cuda13  ## tests that need a GPU; HYPOTHESIS_PROFILE=gpu draws 1,000 examples each
	$(BIN)/python -m pytest -q -m gpu --require-gpu

sanitize: .venv/with-test .venv/with-cuda13  ## the GPU tests under compute-sanitizer, all tools side by side
	$(BIN)/python tests/sanitizer/run.py

bench: .venv/with-cuda13  ## gate, then time every case on this GPU
	$(BIN)/python -m ddtree_cupy.bench

measure: .venv/with-cuda13  ## measure every grid of cases on this GPU and keep the reports
	for grid in "" --tree-sizes --curves; do \
		$(BIN)/python -m ddtree_cupy.bench $$grid --save ddtree_cupy/bench/measurements || exit 1; done

tables: .venv/with-test  ## README and notebook 07 from the newest measurements
	$(BIN)/python -m ddtree_cupy.bench.tables --notebook

docs: .venv/with-docs  ## the site, in docs/_build/html; a warning is an error
	rm -rf docs/_build/api
	$(BIN)/sphinx-build -q -W --keep-going -j auto -c docs -d docs/_build/doctrees . docs/_build/html

clean:
	rm -rf .venv docs/_build
