"""Values that are secrets whatever they are called: tokens by the form that their issuers publish, keys, passwords in
URLs, headers and options.

The forms are those that issuers have registered for scanning
(https://docs.github.com/en/code-security/secret-scanning/introduction/supported-secret-scanning-patterns), as far as
people who train models meet them, and the rest of what gitleaks finds without a name
(https://github.com/gitleaks/gitleaks/blob/master/config/gitleaks.toml). A library (detect-secrets) would bring the same
table, and none of its newer tokens.
"""

from __future__ import annotations

import re

FORMS: dict[str, str] = {
    "a Hugging Face token": r"hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z]{30,}",
    "a GitHub token": r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{22,}",
    "a GitLab token": r"gl(?:pat|ptt|rt|dt|ft|cbt|soat|agent|oas|imt)-[\w.-]{20,}",
    "an API key": r"sk-[A-Za-z0-9_-]{20,}",  # OpenAI, Anthropic, OpenRouter, DeepSeek, ...
    "a key of Groq, xAI, Perplexity or NVIDIA": r"gsk_\w{40,}|xai-\w{40,}|pplx-\w{40,}|nvapi-[\w-]{40,}",
    "a key of Replicate, RunPod, Together, Fireworks or Modal": (
        r"r8_\w{30,}|rpa_[A-Z0-9]{30,}|tgp_v1_[\w-]{30,}|fw_[A-Za-z0-9]{22,}|ak-[A-Za-z0-9]{22}\b"
    ),
    "a Weights & Biases key": r"wandb_v\d_[\w-]{20,}|(?:local-)?(?<=wandb login )[0-9a-f]{40}",
    "a Kaggle or ModelScope token": r"KGAT_[0-9a-f]{32}|ms-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "a key of LangSmith, Tavily, Notion, Linear or Databricks": (
        r"lsv2_(?:pt|sk)_\w{20,}|tvly-[\w-]{20,}|ntn_\w{40,}|secret_[A-Za-z0-9]{43}|lin_api_\w{30,}|dapi[0-9a-f]{32}"
    ),
    "an AWS key": r"(?:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9])[A-Z0-9]{16}",
    "a Google key": r"AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}",
    "an Azure key": r"AccountKey=[A-Za-z0-9+/]{40,}|[\w~.]{3}\dQ~[\w~.-]{31,34}",
    "a key of Alibaba or Tencent Cloud": r"LTAI[A-Za-z0-9]{16,}|AKID[A-Za-z0-9]{32}",
    "a Docker, npm, PyPI or RubyGems token": (
        r"dckr_(?:pat|oat)_[\w-]{20,}|npm_[A-Za-z0-9]{36}|pypi-AgE[\w-]{20,}|rubygems_[0-9a-f]{48}"
    ),
    "a DigitalOcean, Heroku, Vault or Atlassian token": (
        r"do[opr]_v1_[0-9a-f]{40,}|HRKU-[\w-]{20,}|hv[sb]\.[\w-]{20,}|ATATT3[\w=-]{20,}"
    ),
    "a Slack, Discord or Telegram token": (
        r"xox[a-z]-[\w-]{10,}|xapp-\d-[\w-]{10,}|hooks\.slack\.com/services/T\w+/B\w+/\w+"
        r"|discord(?:app)?\.com/api/webhooks/\d+/[\w-]+|\d{8,10}:AA[\w-]{30,}"
    ),
    "a Stripe, SendGrid, Shopify or Twilio key": (
        r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}|shp(?:at|ca|pa|ss)_[0-9a-f]{32}|SK[0-9a-f]{32}"
    ),
    "a JSON web token": r"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}",
    "a private key": r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-\d|AGE-SECRET-KEY-1\w{20,}",
}
# What stands for a value that is taken from elsewhere, or is none.
_NONE = r"(?![$<{%*\[(]|(?i:your|my[_-]|xxx|\.\.\.|example|placeholder|changeme|redacted|token\b|password\b|secret\b))"
_NAME = r"(?:secret|password|passwd|passphrase|credentials?|(?:api|access|secret|private)[_-]?key|{token})"
_OPTION = _NAME.format(token="token")
_FIELD = _NAME.format(token="(?:auth|access|api|bearer|refresh|hub|hf|github|gitlab)[_-]?token")  # not eos_token
IN_PLACE: dict[str, str] = {
    "a password in a URL": rf"\b[a-z][a-z0-9+.-]*://[^\s/:@'\"]*:{_NONE}[^\s/@'\"]+@",
    "a token in a URL": (
        rf"\bhttps?://{_NONE}[^\s/:@'\"]{{16,}}@|[?&](?:X-Amz-Signature|X-Goog-Signature|sig)=[\w%+/-]{{20,}}"
    ),
    "credentials in a header": (
        rf"(?i:authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|token)\s+){_NONE}[\w.~+/=-]{{8,}}"
    ),
    "a password among options": (
        rf"(?i:(?<![\w-])--?{_OPTION}(?:[= ])['\"]?){_NONE}[^\s'\"-][^\s'\"]{{3,}}"
        rf"|\bsshpass\s+-p\s*{_NONE}[^\s'\"]+|\bcurl\b[^\n|;&]*\s(?:-u|--user)[= ]['\"]?[^\s:'\"]+:{_NONE}[^\s'\"]+"
        rf"|\blogin\s+\S+\s+password\s+{_NONE}\S+"
    ),
    "a value that is named as a secret": (
        rf"(?i:(?<![a-z])(?:\w*[_-])?{_FIELD}['\"]?\s*[:=]\s*['\"]?)"
        rf"{_NONE}(?=[\w+/.=-]*\d)(?=[\w+/.=-]*[A-Za-z])[\w+/.=-]{{16,}}"
    ),
}
_FOUND = {
    **{kind: re.compile(rf"(?<![A-Za-z0-9])(?:{form})") for kind, form in FORMS.items()},
    **{kind: re.compile(form) for kind, form in IN_PLACE.items()},
}
SHOWN = 6  # characters, as issuers' prefixes are


def find_secrets(text: str) -> list[str]:
    """What in ``text`` is a secret: its kind and its first characters, such as ``a Hugging Face token, hf_abc...``."""
    return [f"{kind}, {match[0][:SHOWN]}..." for kind, form in _FOUND.items() for match in form.finditer(text)]
