#!/bin/sh
# Extracts Debian packages, and those of their dependencies that are missing here, into a folder: nothing is installed.
#     scripts/extract_debian.sh FOLDER PACKAGE...
set -eu
folder=$1
shift
rm -rf "$folder"
mkdir -p "$folder"
cd "$folder"
apt-cache show "$@" >/dev/null 2>&1 || apt-get update --quiet=2
for package in $(apt-get install --simulate --no-install-recommends "$@" | sed -n 's/^Inst \([^ ]*\).*/\1/p'); do
    apt-get download --quiet=2 -o APT::Sandbox::User=root "$package"
    dpkg -x "$package"_*.deb .
    rm "$package"_*.deb
done
