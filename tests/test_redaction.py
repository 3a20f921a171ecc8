"""What is a secret and what only sounds like one, in trees and texts."""

import pytest

from jtrain.redaction import MASK, is_secret, redact, redact_text

SECRETS = """token hub_token HF_TOKEN hf-token hubToken client_secret WANDB_API_KEY apiKey password db_passwd passphrase
AWS_SECRET_ACCESS_KEY aws_access_key_id AWS_SESSION_TOKEN private_key credentials token_secret optimizer.api_key
use_auth_token secret_token_file"""
PLAIN = """tokenizer use_cls_token num_experts_per_tok eos_token bos_token pad_token_id
token_type_ids tokens batch_tokens tokens_per_second sample_tokens max_new_tokens image_token_index key key_value_heads
num_key_value_heads keyboard next_token model run_dir token_embedding monkey secretary"""


@pytest.mark.parametrize("name", SECRETS.split())
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", PLAIN.split())
def test_names_that_only_sound_like_it(name):
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("data.train: https://me:hunter2@host/a.txt can't be read", "data.train: https://***@host/a.txt can't be read"),
        ("https://hf_user@host/x and s3://b/a", "https://***@host/x and s3://b/a"),
        ("s3://b/a?X-Amz-Signature=abc&part=1", "s3://b/a?X-Amz-Signature=***&part=1"),
        ("https://b/a?sv=2&sig=a%2Fb", "https://b/a?sv=2&sig=***"),
        (
            "HF_TOKEN=abcdef python train.py --hub_token abcdef -x 1",
            "HF_TOKEN=*** python train.py --hub_token *** -x 1",
        ),
        (
            "jtrain x --hub-token a --seed 3 --secret --data.tokenizer b",
            "jtrain x --hub-token *** --seed 3 --secret --data.tokenizer b",
        ),
        ("--wandb.api-key=abc", "--wandb.api-key=***"),
        (
            "url=https://h/a?sig=abc,token=x got https://h/b.c?sig=abc",
            "url=https://h/a?sig=***,token=*** got https://h/b.c?sig=***",
        ),
        ("Authorization: Bearer abcdefgh.ijk", "Authorization: Bearer ***"),
        ("401 for hf_" + "a" * 34 + "!", "401 for ***!"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("unexpected token 'end of template'", "unexpected token 'end of template'"),
        ("the tokenizer has eos_token=</s>, tokens=12", "the tokenizer has eos_token=</s>, tokens=12"),
        ("step 12 | loss 2.3 | 18.2k tok/s", "step 12 | loss 2.3 | 18.2k tok/s"),
        ("learning_rate=0.1 key=3 seed=42", "learning_rate=0.1 key=3 seed=42"),
        ("https://host/a@b", "https://host/a@b"),
    ],
)
def test_texts(text, shown):
    assert redact_text(text, {}) == shown


def test_what_the_environment_calls_a_secret_is_masked_wherever_it_stands():
    env = {"MY_TOKEN": "correct-horse", "SHORT_TOKEN": "the", "HOME": "/home/me", "APP_CREDENTIALS": "/etc/key.json"}
    text = "the server said: correct-horse is no user of /home/me, see /etc/key.json"
    assert redact_text(text, env) == f"the server said: {MASK} is no user of /home/me, see /etc/key.json"


def test_trees_keep_what_is_no_text():
    tree = {"hub": {"token": "abc", "retries": 3, "password": None}, "urls": ("https://a:b@c/d",), "token": ""}
    assert redact(tree) == {
        "hub": {"token": MASK, "retries": 3, "password": None},
        "urls": ["https://***@c/d"],
        "token": "",
    }
