"""Recognise credentials: files that are not copied to run folders, and settings that must not leave them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate
from typing import Any

PUBLIC = ("model", "data", "training", "strategy")  # sections that may leave the run folder
PRIVATE = (
    ["launcher", "setup"], ["launcher", "extra"], ["launcher", "notify"], ["cluster", "environment"],
    ["sweep", "also"],
)  # fmt: skip
# Patterns of names in lower case, with underscores instead of hyphens.
FILES = (
    ".env", ".env.*", "*.env", ".envrc", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx",
    "*.ppk", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".pgpass", ".pypirc",
    ".npmrc", ".htpasswd", "*credential*", "creds*", "*.creds", "*secret*",
    "*password*", "*passwd*", "token", "*.token", "*_token", "token.txt", "*_token.txt", "api_key*",
    "apikey*", "kubeconfig*", "service_account*.json", "auth.json", ".s3cfg", ".boto", ".my.cnf",
)  # fmt: skip
FOLDERS = (
    ".ssh", ".aws", ".azure", ".gnupg", ".kube", ".docker", ".gcloud", "secrets", ".secrets", "credentials",
)  # fmt: skip
# Source, documents, and example files of credentials.
HARMLESS = (
    "*.py", "*.pyi", "*.ipynb", "*.c", "*.h", "*.cc", "*.cpp", "*.cu", "*.cuh", "*.rs", "*.go", "*.java",
    "*.js", "*.ts", "*.md", "*.rst", "*.html", "*.example", "*.sample", "*.template",
)  # fmt: skip
# One expression for all patterns, because each file name of a checkout is compared at every start.
_FILES, _HARMLESS = (re.compile("|".join(map(translate, patterns))) for patterns in (FILES, HARMLESS))
# Matches keys with underscores. `pad_token` and `eos_token_id` are settings of a model and must not match.
_KEY = re.compile(
    r"(?:^|_)(?:secret|password|passwd|passphrase|api_?key|access_key|private_key|credentials?|authorization)(?:$|_)"
    r"|^(?:auth|(?:.+_)?(?:access|api|auth|bearer|git(?:hub|lab)|hf|refresh|session|wandb)_token|token)$",
    re.IGNORECASE,
)
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
_VALUE = re.compile(
    r"-----BEGIN|://[^/\s:@]+:[^/\s@]+@"  # a PEM block; user:password@host
    r"|(?i:\bbearer\s+[\w.~+/-]{8,}|--(?:api-?key|password|token)[= ]\S)"
    r"|\b(?:hf_|gh[pousr]_|github_pat_|sk-|xox[abp]-|AKIA|glpat-)[\w-]{12,}"
)


def is_credential_file(name: str) -> bool:
    """Whether the name of a file suggests that it holds credentials."""
    *folders, name = name.lower().replace("-", "_").split("/")
    is_secret = any(folder in FOLDERS for folder in folders) or _FILES.match(name) is not None
    return is_secret and _HARMLESS.match(name) is None


def public_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The PUBLIC sections of a configuration, without settings that look like credentials."""
    return {key: without_credentials(config[key]) for key in PUBLIC if key in config}


def without_credentials(value: Any) -> Any:
    """Remove keys and texts that look like credentials from a plain value.

    If `value` itself is such a text, the result is None.
    """
    if isinstance(value, Mapping):
        return {
            key: without_credentials(item) for key, item in value.items()
            if not (_is_private_key(str(key)) and not isinstance(item, int | float | None))
            and not _is_credential(item)
        }  # fmt: skip
    if isinstance(value, list):
        return [without_credentials(item) for item in value]
    return None if _is_credential(value) else value


def without_secret_values(overrides: Iterable[str]) -> list[str]:
    """Overrides for a page that others read: a value that may hold a credential is shown as `...`."""
    public = []
    for override in overrides:
        key, equals, value = override.partition("=")
        has_table = "{" in value and set(value).isdisjoint("'\"\\")
        hides = may_be_secret(key, "") if has_table else "{" in value or may_be_secret(key, value)
        public.append(f"{key}{equals}{'...' if hides else _public_items(key, value)}")
    return public


def _public_items(key: str, value: str) -> str:
    """The value without quotes, with `...` for each item of its tables that may hold a credential."""
    path, name, public = [key], "", ""
    for token in re.findall(r"[{},]|[^{},]+", value):
        head, colon, item = token.partition(":")
        if token == "{":
            path.append(name)
        elif token == "}":
            del path[-1:]
        elif token != ",":
            name, item = (head.strip(), item) if colon else (name, head)
            if item.strip() and may_be_secret(".".join(filter(None, (*path, name))), token):
                token = f"{head}:..." if colon else "..."
        public += token
    return public


def may_be_secret(key: str, value: Any) -> bool:
    """Whether a setting may hold a credential. key: dotted, perhaps with Hydra's plus or tilde."""
    parts = key.lstrip("+~").split(".")
    is_private = parts[:2] in PRIVATE or any(map(_is_private_key, parts))
    return is_private or without_credentials(value) != value


def _is_private_key(key: str) -> bool:
    return _KEY.search(_HUMP.sub("_", key).replace("-", "_")) is not None


def _is_credential(value: Any) -> bool:
    return isinstance(value, str) and _VALUE.search(value) is not None
