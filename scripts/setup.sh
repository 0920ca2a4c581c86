#!/bin/sh
# Make .venv for the cpu profile from the pinned requirement files. If nothing has changed, it only checks a stamp.
set -eu
cd "$(dirname "$0")/.."

fail() {
    echo "setup: $1" >&2
    exit 1
}

python=${PYTHON:-python3.11}
command -v "$python" >/dev/null 2>&1 || fail "$python is not installed: install Python 3.11, or set PYTHON=/path/to/python3.11."
# Before 3.11.5, enums are pickled as calls of getattr, which a checkpoint may not make; before 3.11.4, tarfile has no filters.
"$python" -c 'import sys; sys.exit(not (3, 11, 5) <= sys.version_info < (3, 12))' || fail "$python is $("$python" -V); the pinned packages and rlsys need Python 3.11.5 or a later 3.11: set PYTHON=/path/to/python3.11."
"$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python has no venv module: install it (Debian and Ubuntu: apt install python3.11-venv)."

stamp=.venv/.set-up-for
wanted=$(cat requirements/*.txt scripts/setup.sh setup.py pyproject.toml | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && .venv/bin/rlsys --help >/dev/null 2>&1; then
    exit 0
fi

free_mib=$(df -Pm . | awk 'NR==2 {print $4}')
[ "$free_mib" -ge 6144 ] || fail "only $free_mib MiB are free here; the virtual environment needs 6144 MiB."

[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() {
    .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"
}

torch=$(grep '^torch==' requirements/cpu.txt)
echo "setup: installing $torch, CPU build"
cpu_index=https://download.pytorch.org/whl/cpu
if .venv/bin/python -c "import urllib.request as u; u.urlopen('$cpu_index/torch/', timeout=5)" 2>/dev/null; then
    pip install --index-url "$cpu_index" "$torch"
else
    pip install "$torch"
fi
.venv/bin/python -W ignore -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' || fail "pip installed a CUDA build of torch: remove .venv, make $cpu_index reachable or point pip at a CPU build, and try again."

echo "setup: installing the other packages (about 3 GB)"
pip install -r requirements/cpu.txt -r requirements/dev.txt
pip install --no-deps -r requirements/cpu-nodeps.txt
pip install --no-deps --no-build-isolation --editable .
.venv/bin/python -W ignore -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' || fail "a package replaced torch with a CUDA build: remove .venv and try again."
echo "$wanted" >"$stamp"
echo "setup: done"
