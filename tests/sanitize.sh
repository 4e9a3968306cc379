#!/usr/bin/env bash
# The kernel tests against native/ built with AddressSanitizer and UndefinedBehaviorSanitizer.
#
#   tests/sanitize.sh [pytest arguments]
#
# Builds in a temporary directory, with the Python that runs it (PYTHON, by default python3), which needs nanobind,
# cmake and what the tests need. Python itself is not instrumented, so the runtime is preloaded, and leaks, which
# would be those of the interpreter, are not looked for.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake -S "$root" -B "$work/build" -DPython_EXECUTABLE="$(command -v "$python")" \
    -DGRADCOMP_SANITIZE=address,undefined -DGRADCOMP_WERROR=ON > "$work/configure.log" \
    || { cat "$work/configure.log"; exit 1; }
cmake --build "$work/build" --parallel "$(nproc)"

# The package as it would be installed: its Python files with the module beside them.
mkdir "$work/site"
cp -r "$root/gradcomp" "$work/site/gradcomp"
cp "$work"/build/_native.*.so "$work/site/gradcomp/"

runtime=$("${CXX:-g++}" -print-file-name=libasan.so)
# Its exceptions pass through the C++ library, which must be loaded before the sanitizer looks for it.
library=$("${CXX:-g++}" -print-file-name=libstdc++.so)
LD_PRELOAD="$runtime $library" \
    ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 \
    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    PYTHONSAFEPATH=1 PYTHONPATH="$work/site" \
    "$python" -m pytest "$root/tests/kernels" --timeout=600 "$@"
