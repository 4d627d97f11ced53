"""Secrets are found by their values; what only looks like one is left alone."""

from __future__ import annotations

import pytest

from manyhands.core.secret_values import find_secrets

LETTERS = "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA"  # 32
HEX = "0123456789abcdef" * 4
SECRETS = [
    f"hf_{LETTERS}",
    f"ghp_{LETTERS}",
    f"github_pat_{LETTERS}_{LETTERS}",
    f"glpat-{LETTERS[:20]}",
    f"sk-proj-{LETTERS}",
    f"sk-ant-api03-{LETTERS}",
    f"gsk_{LETTERS}{LETTERS}",
    f"xai-{LETTERS}{LETTERS}",
    f"nvapi-{LETTERS}{LETTERS}",
    f"r8_{LETTERS}12345",
    f"wandb login {HEX[:40]}",
    f"WANDB_API_KEY={HEX[:40]}",
    f"KGAT_{HEX[:32]}",
    f"dapi{HEX[:32]}",
    "AKIAIOSFODNN7ABCDEFG",
    f"aws_secret_access_key = {LETTERS}{LETTERS[:8]}",
    f"AIza{LETTERS}abc",
    f"ya29.{LETTERS}",
    f"DefaultEndpointsProtocol=https;AccountKey={LETTERS}{LETTERS}==",
    f"dckr_pat_{LETTERS}",
    f"npm_{LETTERS}abcd",
    f"pypi-AgEIcHlwaS5vcmc{LETTERS}",
    f"xoxb-123456789012-{LETTERS}",
    f"https://hooks.slack.com/services/T0000/B0000/{LETTERS}",
    f"123456789:AA{LETTERS}",
    "sk_live_" + LETTERS,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijklmnop",
    "-----BEGIN OPENSSH PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----",
    "pip install --index-url https://me:hunter2@pypi.example.com/simple",
    "postgresql://user:pa55@db/x",
    "s3://key:secretvalue@bucket/folder",
    f"git clone https://{LETTERS}@github.com/o/r",
    f"curl -H 'Authorization: Bearer {LETTERS}' https://x",
    "curl -u me:hunter2 https://x",
    "sshpass -p hunter2 ssh host",
    "hf auth login --token hunter2hunter2",
    "docker login --password=hunter2",
    f'{{"api_key": "{LETTERS}"}}',
    f"https://b.s3.amazonaws.com/x?X-Amz-Signature={HEX}",
    "machine x login me password hunter2",
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_found_wherever_it_stands(text: str) -> None:
    for around in (text, f"export X={text}", f'"{text}"', f"see {text}, and more"):
        assert find_secrets(around), around
    assert all(LETTERS not in found and "hunter2" not in found for found in find_secrets(text))


HARMLESS = [
    'export HF_TOKEN="$(cat ~/token)" MODE=fast',
    "WANDB_API_KEY=$WANDB_API_KEY hf auth login --token $HF_TOKEN",
    "https://user:$PASSWORD@host/x and https://user:<password>@host",
    "https://huggingface.co/someone/base",
    "git+ssh://git@github.com/owner/repository.git",
    "pip install 'manyhands[deepspeed]' --extra-index-url https://download.pytorch.org/whl/cu128",
    "eos_token: <|endoftext|>",
    '{"image_token": "reserved_special_token_12", "access_token_type": "x"}',
    '{"bos_token": "<s>", "pad_token_id": 128004, "add_bos_token": true, "tokenizer_class": "PreTrainedTokenizerFast"}',
    "max_new_tokens=1024 num_tokens: 123456789012345678",
    "module load cuda/12.8; source activate env-2026",
    f"Digest of the prepared samples: `{HEX}`.",
    "api_key: your-api-key-goes-here-123",
    "trained on someone/sk-dataset, task-arithmetic-in-a-long-name-of-a-model",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_names_placeholders_and_digests_are_none(text: str) -> None:
    assert find_secrets(text) == []
