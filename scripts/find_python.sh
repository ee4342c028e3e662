#!/bin/sh
# Prints a Python 3.12 or newer that can make a virtual environment, or says how to get one.
# A name on PATH may be a shim that refuses to run, so every candidate is tried, not looked up.
set -u

fits() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

pyenv_root=${PYENV_ROOT:-$HOME/.pyenv}
for candidate in ${PYTHON:-} python3.12 python3.13 python3.14 python3 python \
    "$pyenv_root"/versions/3.12.*/bin/python "$pyenv_root"/versions/3.1[3-9].*/bin/python; do
    if fits "$candidate"; then
        "$candidate" -c 'import sys; print(sys.executable)'
        exit 0
    fi
done

cat >&2 <<'MESSAGE'
error: no Python 3.12 or newer found (megatron-core needs it)

hint: install one (`pyenv install 3.12`, or your system's python3.12 and python3.12-venv packages),
      or name it: make PYTHON=/path/to/python3.12 demo
MESSAGE
exit 1
