#!/bin/sh
# Runs the Chromium that `make chromium` has extracted to the folder CHROMIUM.
root=${CHROMIUM:-$(dirname "$0")/../.venv/chromium}
found=$(find "$root/usr/lib" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
LD_LIBRARY_PATH=$found exec "$root/usr/lib/chromium/chromium-headless-shell" "$@"
