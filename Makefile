# Two commands: `make demo` and `make test`. Both make the environment first; nothing but Python
# 3.11+ and git is needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= demo

.PHONY: demo serve-demo test test-notebooks test-fast coverage lint docs lock notebooks clean

# uv resolves and unpacks several GB in seconds; it comes from the same registry as everything else.
# Compiled once: where PYTHONDONTWRITEBYTECODE is set, each process would compile torch anew.
$(VENV)/.ready: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.8
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --compile-bytecode --requirement requirements.lock
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --editable .
	touch $@

# Images to Faiss index on scikit-learn's real digits; every line is a command that you can type.
# Under two minutes on one core, half of it for the training of the default, at half of its steps.
# One thread: the table is the tutorial's, and a busy core does not slow it down.
demo: export OMP_NUM_THREADS = 1
demo: $(VENV)/.ready
	@rm -rf $(DEMO)
	$(BIN)/gpq train digits --labelled 20-per-class --set network.backbone=mlp --bits 48 --set training.steps=400 --out $(DEMO)/model
	$(BIN)/gpq encode $(DEMO)/model digits --out $(DEMO)/codes.h5
	$(BIN)/gpq export-faiss $(DEMO)/model --out $(DEMO)/empty.faiss
	$(BIN)/gpq index $(DEMO)/model $(DEMO)/codes.h5 --out $(DEMO)/index.faiss
	$(BIN)/gpq search $(DEMO)/model $(DEMO)/index.faiss digits --rows 0:8 -k 10 --format png --images digits --out $(DEMO)/ranked.png
	$(BIN)/gpq train digits --labelled 20-per-class --preset paper --bits 48 --out $(DEMO)/paper
	$(BIN)/gpq evaluate $(DEMO)/model digits --protocol 1 --compare $(DEMO)/paper,pq,opq,itq,classifier --plot $(DEMO)/pr.png
	@echo
	@echo "Ranked results: $(DEMO)/ranked.png"
	@echo "Index:          $(DEMO)/index.faiss   (python -c \"import faiss; print(faiss.read_index('$(DEMO)/index.faiss').ntotal)\")"

# The digits, their index and the page at http://127.0.0.1:8000/, by the products of `make demo`
# where they are there; else by a short training of the preset paper.
serve-demo: $(VENV)/.ready
	@test -d $(DEMO)/model || $(BIN)/gpq train digits --labelled 20-per-class --preset paper --set network.backbone=mlp --bits 48 --out $(DEMO)/model
	@test -f $(DEMO)/codes.h5 || $(BIN)/gpq encode $(DEMO)/model digits --out $(DEMO)/codes.h5
	@test -f $(DEMO)/index.faiss || $(BIN)/gpq index $(DEMO)/model $(DEMO)/codes.h5 --out $(DEMO)/index.faiss
	$(BIN)/gpq serve $(DEMO)/index.faiss --model $(DEMO)/model --data digits

# Workers of one thread each, one more than two cores have: some tests wait for processes that were
# killed. The package is compiled once for all processes, as are the tests from the second time on,
# and plugins that no test uses are not loaded in each of them.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.ready
	$(BIN)/python -m compileall -q gpq_faiss cli
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal -m "not notebook" \
	  --disable-plugin-autoload -p xdist -p _hypothesis_pytestplugin

# The notebooks run from top to bottom, and show what their texts say: about a minute.
test-notebooks: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m notebook tests/test_notebooks.py

# The packages whose tests train nothing: under a minute, for use during development.
test-fast: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q -m "not slow" tests/codes tests/data tests/evaluation tests/losses \
	  tests/report tests/store tests/test_config.py tests/test_files.py tests/test_layers.py tests/test_public_api.py

# Statements and branches that the tests reach, by file, one room of tests after another: about
# twenty minutes on one core. Lines that other processes run count as well (pyproject.toml), unless
# they are killed.
coverage: $(VENV)/.ready
	rm -f .coverage .coverage.*
	for tests in tests/[!_]*/ tests/test_*.py; do \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow" --cov=gpq_faiss --cov-branch --cov-append --cov-report= $$tests || exit; \
	done
	$(BIN)/python -m coverage report --skip-covered

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site, in site/; any warning is an error.
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Run the scripts of the notebooks anew and write what they show.
notebooks: $(VENV)/.ready
	$(BIN)/python notebooks/build.py

lock:
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --no-header --quiet --output-file requirements.lock

clean:
	rm -rf $(VENV) $(DEMO) site
