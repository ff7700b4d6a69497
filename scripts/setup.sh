#!/bin/sh
# Makes .venv hold exactly what requirements.lock says, on a machine that has git, make and some Python >= 3.8.
#
# Four steps: uv (fetched with pip if missing), Python (.python-version), system libraries (Debian and Ubuntu),
# packages. Called by every make target; a second call with nothing changed returns at once.
set -eu
cd "$(dirname "$0")/.."

wanted=$(cat .python-version)
stamp=.venv/setup-stamp

say() { printf 'setup: %s\n' "$*" >&2; }
stop() { say "$*"; exit 1; }

# The stamp: one hash over all that decides what is installed, then the folder (the scripts in .venv hold its path).
sha() { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi; }
key() { cat requirements.lock pyproject.toml .python-version scripts/setup.sh | sha; pwd; }
now=$(key)
if [ -x .venv/bin/python ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$now" ]; then exit 0; fi

# Debian packages, if we are root; the output goes to a file because only a failure is of interest.
apt_install() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    say "installing $* with apt-get"
    mkdir -p .tools
    {
        apt-get update || true # one broken package source must not stop the others
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
    } >.tools/apt.log 2>&1 </dev/null && return 0
    say "apt-get failed; its output is in .tools/apt.log"
    return 1
}

any_python() {
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9 python3.8 /usr/bin/python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 8))' >/dev/null 2>&1; then
            echo "$candidate"
            return 0
        fi
    done
    return 1
}

# --- 1. uv: the one on PATH, or a private one in .tools
find_uv() {
    for candidate in uv .tools/bin/uv "${HOME:-/nonexistent}/.local/bin/uv"; do
        if "$candidate" python find --help >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

install_uv() {
    python=$(any_python) || stop "no Python 3.8 or newer on PATH. Type: apt-get install python3 python3-pip"
    say "fetching uv"
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        if "$python" -m venv .tools >/dev/null 2>&1; then
            python=.tools/bin/python
        else
            apt_install python3-pip || stop "$python has no pip. Type: sudo apt-get install python3-pip"
            python=/usr/bin/python3
        fi
    fi
    PIP_ROOT_USER_ACTION=ignore "$python" -m pip install --quiet --disable-pip-version-check --no-warn-script-location --upgrade \
        --target .tools 'uv>=0.8,<1' || stop "pip could not install uv (see above). Type: $python -m pip install --user uv"
}

uv=$(find_uv) || { install_uv && uv=$(find_uv); } || stop "uv does not run here. Type: pip install --user uv"

# --- 2. Python
find_python() {
    "$uv" python find --system "$wanted" 2>/dev/null && return 0
    for candidate in "${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}/versions/$wanted"*/bin/python; do
        if [ -x "$candidate" ]; then echo "$candidate" && return 0; fi
    done
    return 1
}

python=$(find_python) || {
    say "fetching Python $wanted"
    "$uv" python install --quiet "$wanted" >/dev/null 2>&1 || { command -v pyenv >/dev/null && pyenv install -s "$wanted" >&2; } ||
        stop "no Python $wanted here, and none could be fetched. Type: apt-get install python$wanted, or pyenv install $wanted"
    python=$(find_python) || stop "Python $wanted was installed but is not found. Put python$wanted on PATH."
}

# --- 3. System libraries. MuJoCo draws offscreen with OSMesa, and nothing works without. drivetrain itself decodes video
# with PyAV, which brings its own FFmpeg; stock LeRobot decodes with torchcodec, which needs the system's.
has_library() {
    "$python" -c 'import sys, ctypes.util as u; sys.exit(not all(map(u.find_library, sys.argv[1:])))' "$@" 2>/dev/null
}

has_browser() {
    for candidate in chromium chromium-browser google-chrome google-chrome-stable; do
        if command -v "$candidate" >/dev/null; then return 0; fi
    done
    return 1
}

if [ "$(uname -s)" = Linux ]; then
    # Whoever renders through EGL (MUJOCO_GL=egl) needs no OSMesa.
    if [ "${MUJOCO_GL:-osmesa}" = osmesa ] && ! has_library OSMesa; then
        apt_install libosmesa6 || stop "MuJoCo cannot draw here. Type: sudo apt-get install libosmesa6"
    fi
    wanting=""
    if ! has_library avcodec avdevice avfilter; then wanting="ffmpeg"; fi
    if ! has_browser; then wanting="$wanting chromium fonts-dejavu-core"; fi
    # shellcheck disable=SC2086  # a list of package names
    if [ -n "$wanting" ] && ! apt_install $wanting; then
        say "tests of videos in LeRobot and of web pages are skipped. To run them type: sudo apt-get install" $wanting
    fi
fi

# --- 4. Packages
# A .venv that was moved or copied here has another folder's path in its scripts; another Python cannot be kept either.
if [ -f "$stamp" ] && [ "$(sed -n 2p "$stamp")" != "$(pwd)" ]; then rm -rf .venv; fi
rm -f "$stamp"
if [ "$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" != "$wanted" ]; then
    rm -rf .venv
    "$uv" venv --quiet --python "$python" .venv || stop "uv could not make .venv with $python (see above)."
fi
quiet=--quiet
if [ -t 2 ]; then quiet=""; fi # a person sees the progress bars, a log does not
say "installing the packages of requirements.lock into .venv (about 6 GB when new)"
# shellcheck disable=SC2086  # $quiet is one option or none
"$uv" pip sync $quiet --python .venv/bin/python --require-hashes requirements.lock ||
    stop "the packages could not be installed (see above). Check network and disk, then run make again."
# shellcheck disable=SC2086
"$uv" pip install $quiet --python .venv/bin/python --no-deps --editable . ||
    stop "drivetrain itself could not be installed (see above)."
printf '%s\n' "$now" >"$stamp"
say "done"
