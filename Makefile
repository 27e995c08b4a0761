# Everything the book needs, from a fresh clone: `make book`, then open what it prints.
#
#   make book      install into .venv (first time only), execute the chapters from their records, build the site
#   make test      all tests                          make check    lint, format and pairs, in seconds
#   make serve     the built site on localhost:8000   make pair     write each chapter's .ipynb from its .py
#   make bench     how fast, on this machine          make record CHAPTER=03_ladder PROFILE=desk    train and record
#   make oldest    models with the oldest timm        … FINISHED=1    train nothing, keep what is finished by now
#
# An active virtual or conda environment, or `PYTHON=/path/to/python`, is used as it is; otherwise .venv is made.

ifdef PYTHON
else ifdef VIRTUAL_ENV
PYTHON := $(VIRTUAL_ENV)/bin/python
else ifeq ($(CONDA_DEFAULT_ENV),vitbook)
PYTHON := $(CONDA_PREFIX)/bin/python
else
PYTHON := .venv/bin/python
READY := .venv/installed
endif

# Chapters run in processes of their own; they shall import this tree, whichever Python runs them.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
BASE_PYTHON ?= $(firstword $(shell command -v python3.11) python3)
PROFILE ?= desk
PORT ?= 8000
BUILD := $(PYTHON) book/build.py

.PHONY: book test oldest check pair record bench serve ready

book: ready
	$(BUILD) book

test: ready
	$(PYTHON) -m pytest

# The models are written against timm's inside: they are tested with the oldest release that pyproject.toml takes, too.
OLDEST := $(shell sed -n 's/.*"timm>=\(.*\)".*/timm==\1/p' pyproject.toml)
oldest: ready
	test -d .oldest/timm || $(PYTHON) -m pip install -q --no-deps --target .oldest $(OLDEST)
	PYTHONPATH=.oldest:$(PYTHONPATH) $(PYTHON) -m pytest $(wildcard tests/test_locat*.py) tests/test_adapters.py tests/test_models.py

check: ready
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pytest tests/test_pairs.py

pair: ready
	$(BUILD) pair

# On Linux: memory once taken is kept, in pages of 2 MiB. Two trainings side by side process 1.2 times as many images;
# other systems read nothing of this.
record: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296:glibc.malloc.top_pad=268435456
record: ready
	@test -n "$(CHAPTER)" || { echo 'say which chapter: make record CHAPTER=03_ladder PROFILE=desk'; exit 2; }
	$(BUILD) record $(CHAPTER) --profile $(PROFILE) $(if $(FINISHED),--finished)

bench: ready
	$(PYTHON) tests/bench.py

serve:
	@test -f book/_build/html/index.html || { echo 'nothing built yet: run `make book` first'; exit 2; }
	$(PYTHON) -m http.server --directory book/_build/html --bind 127.0.0.1 $(PORT)

ready: $(READY)
	@$(PYTHON) -c "import importlib.util, sys; sys.exit(any(importlib.util.find_spec(m) is None \
	for m in ('vitbook', 'jupyter_book', 'papermill', 'pytest')))" || { \
	echo "$(PYTHON) lacks the book's packages: $(PYTHON) -m pip install -c requirements.lock -e '.[book,test]'"; exit 2; }

.venv/installed: pyproject.toml requirements.lock
	test -x .venv/bin/python || $(BASE_PYTHON) -m venv .venv
	.venv/bin/python -m pip install -c requirements.lock -e '.[book,test]'
	.venv/bin/python book/vendor.py
	touch $@
