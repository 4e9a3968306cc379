#!/usr/bin/env bash
# Builds the last released Horovod, unpatched, for the torch of a Python environment, and installs it there.
#
#   scripts/install_horovod.sh [--mpi] [PYTHON]
#
# PYTHON: the interpreter of the environment (default: python3). It must have torch. --mpi: build Horovod's MPI
# form too, with the mpicxx on PATH. Takes a minute or two; does nothing where Horovod is there already.
#
# A plain `pip install horovod` fails against torch 2.1 and newer, or "succeeds" without its extension. What this
# script does otherwise, and why, stands at each step. Needs a C++ compiler, GNU make and pip.
set -euo pipefail

HOROVOD=horovod==0.28.1

say() { echo "install_horovod: $*"; }
fail() {
    echo "install_horovod: $*" >&2
    exit 1
}

python=python3
mpi=
while (($#)); do
    case $1 in
        --mpi) mpi=1 ;;
        -h | --help)
            sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
            exit
            ;;
        -*) fail "unknown option $1; usage: $0 [--mpi] [PYTHON]" ;;
        *) python=$1 ;;
    esac
    shift
done

# ------------------------------------------------------------------------------------------ what must be there

asked=$python
python=$(command -v "$asked") || fail "there is no such interpreter: $asked"
# The scripts of the environment (cmake, horovodrun) stand beside its interpreter.
PATH=$(cd "$(dirname "$python")" && pwd):$PATH
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$python is older than Python 3.11"
"$python" -m pip --version >/dev/null || fail "$python has no pip"
torch=$("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null) ||
    fail "$python has no torch: install it first, in the build you want (pip install torch)"
compiler=$(command -v "${CXX:-g++}" || command -v c++) || fail "there is no C++ compiler: install g++, or set CXX"
command -v make >/dev/null || fail "there is no make: install GNU make"
[[ -z $mpi ]] || command -v mpicxx >/dev/null || fail "--mpi needs mpicxx on PATH: install an MPI with its compiler wrappers"

# Horovod's own check (horovodrun --check-build) claims PyTorch even where its extension is missing: import it.
works() {
    "$python" - "$mpi" <<'PYTHON'
import sys
try:
    import horovod.torch as hvd
except ImportError as error:
    sys.exit(f"horovod.torch cannot be imported: {error}")
if not hvd.gloo_built():
    sys.exit("Horovod is there, but without Gloo")
if sys.argv[1] and not hvd.mpi_built():
    sys.exit("Horovod is there, but without MPI")
PYTHON
}

if works 2>/dev/null; then
    say "already there: $HOROVOD works in $python"
    exit
fi

# ------------------------------------------------------------------------------------------ build

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# torch's headers need C++17, Horovod's CMake files ask for less: the last -std counts. xla_mpi_ops.cc belongs to
# TensorFlow, is compiled all the same, and does not compile: an empty file takes its place.
: >"$work/empty.cc"
cat >"$work/cxx" <<WRAPPER
#!/usr/bin/env bash
arguments=()
for argument; do
    case \$argument in
        */xla_mpi_ops.cc) argument=$work/empty.cc ;;
    esac
    arguments+=("\$argument")
done
exec "$compiler" "\${arguments[@]}" -std=c++17
WRAPPER
chmod +x "$work/cxx"

say "build requirements"
requirements=(wheel packaging setuptools cloudpickle psutil pyyaml cffi)
command -v cmake >/dev/null || requirements+=(cmake)
"$python" -m pip install --quiet --disable-pip-version-check "${requirements[@]}"

engines=(HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1)
[[ -z $mpi ]] || engines=(HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1)

# No build isolation: in an environment of its own the build would not find torch, and leave the extension out.
# CMake 4 refuses what Horovod's files say they were written for.
say "building $HOROVOD for torch $torch with $compiler: a minute or two"
log=$work/log
env CXX="$work/cxx" "${engines[@]}" HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    CMAKE_POLICY_VERSION_MINIMUM=3.5 MAKEFLAGS="-j${JOBS:-2}" \
    "$python" -m pip install --no-cache-dir --no-build-isolation --no-deps --force-reinstall \
    --disable-pip-version-check "$HOROVOD" >"$log" 2>&1 || {
    grep -E -A5 'error|Error' "$log" | head -n 60 >&2
    fail "the build failed"
}

problem=$(works 2>&1) || fail "built, but it does not work: $problem"
say "done: $HOROVOD in $python"
