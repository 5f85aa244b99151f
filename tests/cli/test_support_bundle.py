"""`magnetar support-bundle`: what is in it, and that no secret, payload, key or property is."""

import json
import stat
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from magnetar.cli.admin import support_bundle
from magnetar.cli.admin.support_bundle import BUNDLED_FILES, REDACTED_TEXT, redact_text, redact_values
from magnetar.cli.common.processes import Processes
from tests.support.processes import run_here

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhZG1pbiJ9.c2lnbmF0dXJlLXBsYW50ZWQ"
PEM = "-----BEGIN PRIVATE KEY-----\nMIIplanted0\nplanted1\n-----END PRIVATE KEY-----"
PLANTED = {
    "token": ("token={}", JWT), "bearer": ("Authorization: Bearer {}", "planted-bearer-7"),
    "password": ("password: '{}'", "planted-password-7"), "json": ('{{"secret_key": "{}"}}', "planted-json-7"),
    "url": ("postgresql://etl:{}@db/x", "planted-url-7"), "pem": ("{}", PEM), "bare token": ("role of {}", JWT),
    "data": ("key is data:;base64,{}", "cGxhbnRlZC1kYXRh"), "aws": ("{} is used", "AKIAPLANTED1234567"),
    "two words": ('{{"passphrase": "{}", "x": 1}}', 'planted two \\" planted words'),
    "variable": ("MAGNETAR_CLIENT_SECRET={}", "planted-variable-7"), "basic": ("basic {}", "ZXRsOnBsYW50ZWQ="),
    "escaped": (r'{{\"api_key\": \"{}\"}}', "planted-escaped-7"),
    "option": ("magnetar --password {} -v", "planted-option-7"), "short name": ("pwd={} user=x", "planted-pwd-7"),
    "comma": ("password=a,{}", "planted-comma-7"), "semicolon": ("password=a;{}", "planted-semicolon-7"),
    "access key": ("Endpoint=sb://x/;SharedAccessKey={}", "planted-access-7="),
    "user of a URL": ("https://{}@git.example/x", "planted-user-7"),
    "at in a URL": ("postgresql://app:a@{}@db/x", "planted-at-7"),
    "slash in a URL": ("postgresql://app:a/{}@db/x", "planted-slash-7"),
    "cookie": ("Cookie: magnetar_page_80={}", "planted-cookie-7"),
    "digest": ("Authorization: Digest {}", "planted-d-7"),
    "PGPASS": ("PGPASS={}", "planted-pgpass-7"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_what_looks_like_a_secret_is_blanked_in_any_text(name: str) -> None:
    form, secret = PLANTED[name]
    found = redact_text(f"before\n{form.format(secret)}\nafter 7")
    assert REDACTED_TEXT in found
    assert not [part for part in secret.split("\n") if part in found]
    assert found.startswith("before\n")
    assert found.endswith("\nafter 7")


def test_a_key_whose_beginning_was_cut_off_is_blanked() -> None:
    assert redact_text("planted0\nplanted1\n-----END PRIVATE KEY-----\nafter 7") == f"{REDACTED_TEXT}\nafter 7"


@pytest.mark.parametrize("part", ["a", "secret", "-", "secret-", "://a:", "-----BEGIN A PRIVATE KEY-----", "data:",
                                  "eyJaaaa.aaaa", "password=", "password ", '"', "a:"])  # fmt: skip
def test_the_work_is_linear_in_the_text(part: str) -> None:
    def seconds(times: int) -> float:
        text = part * (times * 20_000 // len(part))
        begun = time.process_time()
        redact_text(text)
        return time.process_time() - begun

    bound = 40 * max(0.005, min(seconds(1) for _ in range(3)))
    assert any(seconds(16) < bound for _ in range(3)), "a busy machine makes one of them slow"


def test_values_are_blanked_by_their_names_and_the_document_stays_one() -> None:
    given = {
        "token": {"secret_key": "x"}, "client_secret": ["a", "b"], "bytes": 5, "password": 7, "private_key": None,
        "nested": [{"name": "oidc_secret", "value": "x", "source": "file"}, {"name": "cache_bytes", "value": "9"}],
    }  # fmt: skip
    found = json.loads(redact_text(json.dumps(redact_values(given))))
    assert found == {
        "token": REDACTED_TEXT, "client_secret": REDACTED_TEXT, "bytes": 5, "password": REDACTED_TEXT,
        "private_key": REDACTED_TEXT, "nested": [{"name": "oidc_secret", "value": REDACTED_TEXT, "source": "file"},
        {"name": "cache_bytes", "value": "9"}],
    }  # fmt: skip


def test_what_would_be_in_it_is_listed_and_no_server_is_asked() -> None:
    done = run_here("support-bundle", "--dry-run", "-o", "name", "--url", "magnetar://127.0.0.1:1")
    assert done.code == 0, done.err
    assert done.out.split("\n")[:-1] == [each.name for each in BUNDLED_FILES]


@pytest.mark.parametrize("security", [None, "security.toml"])
def test_a_bookie_that_does_not_answer_is_named_with_how_to_ask_it(
    security: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = SimpleNamespace(id="b1", endpoint="b1:7641")
    session: Any = SimpleNamespace(
        admin=SimpleNamespace(bookies=lambda: [bookie]), operator=SimpleNamespace(security=security)
    )
    monkeypatch.setattr(support_bundle, "ask_reachable_bookies", lambda session, verb: {})
    bundle = support_bundle.SupportBundle()
    support_bundle._add_bookies(bundle, session)
    assert bundle.files == {}
    helps = "" if security else "; in a secured cluster give --security FILE --metadata HOST:PORT"
    assert bundle.missing == [f"bookie b1 at b1:7641 does not answer this command{helps}"]


@pytest.mark.processes
def test_planted_secrets_payloads_keys_and_properties_are_not_in_a_bundle(started: Processes, tmp_path: Path) -> None:
    url = started.start("s", "standalone", "--port", "0", "--data", str(tmp_path / "data")).wait_ready()
    run_here("topics", "create", "orders", "--url", url)
    run_here("topics", "create-subscription", "orders", "-s", "billing", "-p", "note=planted-of-sub", "--url", url)
    run_here("topics", "update-properties", "orders", "-p", "owner=planted-of-topic", "--url", url)
    run_here("namespaces", "set-properties", "public/default", "-p", "owner=planted-of-ns", "--url", url)
    sent = run_here(
        "produce", "orders", "-m", "planted-payload", "-k", "planted-key", "-H", "trace:planted-property", "--url", url
    )
    assert sent.code == 0, sent.err
    log, config, other = tmp_path / "broker.log", tmp_path / "magnetar.toml", tmp_path / "wrong.toml"
    log.write_text("\n".join(form.format(secret) for form, secret in PLANTED.values()) + "\nlast line\n")
    config.write_text('[broker]\nname = "one"\n[client]\npassword = "planted-in-toml"\ntokens = ["planted-in-list"]\n')
    other.write_text("planted-in-no-toml")
    bundle = tmp_path / "b.tar.gz"
    asked = ("support-bundle", str(bundle), "--apart", "0", "--url", url)
    done = run_here(*asked, "--log", str(log), "--config", str(config), "--config", str(other), "-o", "json")
    assert done.code == 0, done.err
    assert "left out" in done.err, "a file that is no TOML"

    with tarfile.open(bundle) as archive:
        texts = {each.name: archive.extractfile(each).read().decode() for each in archive}  # type: ignore[union-attr]
    everything = "\n".join(texts.values())
    for _, secret in PLANTED.values():
        assert not [part for part in secret.split("\n") if part in everything]
    assert "planted" not in everything.replace(str(tmp_path), ""), "of messages, properties, settings"
    assert "last line" in texts["magnetar-support/logs/broker.log"]
    assert json.loads(texts["magnetar-support/config/magnetar.toml.json"])["broker"] == {"name": "one"}

    folders = {name.split("/")[1] for name in texts if name.endswith("/settings.json")}
    (folder,) = folders
    expected = {
        each.name.replace("BROKER", folder).replace("config/NAME", "config/magnetar.toml") for each in BUNDLED_FILES
    }
    (bookie,) = (name.split("/")[2] for name in texts if name.startswith("magnetar-support/bookies/"))
    expected = {name.replace("bookies/BOOKIE.json", f"bookies/{bookie}") for name in expected}
    expected = {f"magnetar-support/{name.replace('logs/NAME', 'logs/broker.log')}" for name in expected}
    assert set(texts) == expected
    assert sorted(json.loads(done.out)["files"]) == sorted(name.removeprefix("magnetar-support/") for name in texts)
    topics = json.loads(texts["magnetar-support/topics.json"])
    assert [each["name"] for each in topics] == ["persistent://public/default/orders"]
    assert "magnetar_broker_publish_seconds" in texts[f"magnetar-support/{folder}/metrics-1.txt"]
    assert "broker-policies" in texts[f"magnetar-support/{folder}/tasks.txt"]
    settings = json.loads(texts[f"magnetar-support/{folder}/settings.json"])["settings"]
    assert {each["name"]: each["source"] for each in settings}["cluster"] == "default"
    told = json.loads(texts[f"magnetar-support/bookies/{bookie}"])
    assert told["state"]["bookie"] == told["report"]["bookie"] == bookie.removesuffix(".json")
    assert json.loads(texts["magnetar-support/repair.json"])["bookies"]["bookies"][0]["state"] == "writable"
    nodes = json.loads(texts["magnetar-support/metadata.json"])
    assert [each["path"] for each in nodes] == ["/", "/cluster", "/ids/ledger"]
    assert "metrics, logs and settings of bookies and of the metadata service" in texts["magnetar-support/README.txt"]
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
    again = run_here(*asked)
    assert again.code == 1
    assert "exists already" in again.err
