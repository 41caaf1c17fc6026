"""The tests of the documents notice what is wrong in one: documents that are made up."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import Document
from rules import Broken, Walk, follow, rule_for

COMPOSE = "services:\n  tokenizer: {image: x, profiles: [cpu]}\n"
POD = "kind: Pod\nmetadata: {name: engine}\nspec: {volumes: [{name: x, secret: {secretName: token}}]}\n"
DOCKERFILE = "ARG VARIANT=cpu\nFROM scratch AS server\n"

UNIT = """[Service]
ExecStart=/opt/x/bin/mimo-tokenizer serve --model /models/x --device cpu --address unix:///run/mimo/s
User=x
RuntimeDirectory=mimo
TimeoutStopSec=45"""

SERVE = "mimo-tokenizer serve --model /models/x --address unix:///run/s"


@pytest.fixture
def read(walk: Callable[[Path], Walk], tmp_path: Path) -> Callable[[str], Walk]:
    """Follows a document of the given text, which lies beside files of each kind; returns the reader."""
    files = {"docker-compose.yml": COMPOSE, "pod.yaml": POD, "Dockerfile": DOCKERFILE, "broken.yaml": "[1]"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    def run(text: str) -> Walk:
        (tmp_path / "doc.md").write_text(text)
        reader = walk(tmp_path)
        follow(reader, Document(tmp_path / "doc.md", tmp_path).commands())
        return reader

    return run


def fence(text: str, language: str = "") -> str:
    """A block of a document."""
    return f"Do this:\n\n```{language}\n{text}\n```\n"


WRONG = [
    (fence("frobnicate --all"), "no rule says how it is run"),
    (fence("assert 1 is None", "python"), "AssertionError"),
    (fence("print(waveform)", "python"), "name 'waveform' is not defined"),
    (fence("1 + 1", "ruby"), "no rule says what a block of 'ruby' is"),
    (fence("$x\nmake demo", "text").replace("$x", "so:"), "a block of text holds a command: make demo"),
    (fence(f"{SERVE} --nonsense 3"), "No such option"),
    (fence(f"{SERVE} --device 'cuda 1'"), "'cuda 1' is no device"),
    (fence("mimo-tokenizer serve --model /models/x --address unix:///absent/s"), "there is no folder"),
    (fence("pip install 'mimo-audio-tokenizer-service[absent]'"), "there is no extra absent"),
    (fence("pip install x  # from a clone: pip install '.[absent]'"), "x is not what this repository is"),
    (fence("make absent"), "No rule to make target"),
    (fence("make demo MODLE=x"), "the Makefile makes nothing of MODLE=x"),
    ("Say `make absent` or `mimo-tokenizer encode in.wav out.npz --wrong`.", "No rule to make target"),
    (fence("export MIMO_AUDIO_TOKENIZER_ADRESS=x"), "nothing reads MIMO_AUDIO_TOKENIZER_ADRESS"),
    (fence("curl http://127.0.0.1:9100/metrics"), "exit status 7"),
    (fence("vllm serve /models/x --omni --deploy-config absent.yaml"), "there is no file absent.yaml"),
    (fence("docker compose --profile gpu up"), "no service has the profile gpu"),
    (fence("docker compose logs -f engine"), "there is no service engine"),
    (fence("docker compose -f absent.yml up"), "there is no file"),
    (fence("docker build --target client ."), "Dockerfile has no stage client"),
    (fence("docker build --build-arg VARIAN=cuda ."), "Dockerfile has no argument VARIAN"),
    (fence("kubectl apply -f absent.yaml"), "there is no file"),
    (fence("kubectl apply -f broken.yaml"), "no object of Kubernetes"),
    (fence("kubectl wait --for=condition=Ready pod/tokenizer"), "none of the files names tokenizer"),
    (fence("kubectl exec engine --container main -- ls"), "none of the files names main"),
    (fence("kubectl create secret generic tokn --from-file x"), "none of the files names tokn"),
    (fence("install --directory --group audio --mode 9 /run/x"), "invalid mode"),
    (fence("openssl rnd -hex 32 > tokens"), "exit status 1 of openssl"),
    (fence(UNIT.replace("45", "30"), "ini"), "it is killed before its calls are done"),
    (fence(UNIT.replace("=mimo", "=other"), "ini"), "the socket is not in /run/other"),
    (fence(UNIT.replace("User", "Usr"), "ini"), "no rule says what these do: Usr"),
    (fence(UNIT.replace("--model", "--modle"), "ini"), "No such option"),
    (fence("docker compose exec tokenizer frobnicate"), "no rule says how it is run: doc.md:3: frobnicate"),
]


@pytest.mark.parametrize(("text", "why"), WRONG, ids=[why for _, why in WRONG])
def test_what_is_wrong_is_noticed(read: Callable[[str], Walk], text: str, why: str) -> None:
    with pytest.raises(Broken) as broken:
        read(text)
    assert why in str(broken.value)


def test_a_server_its_clients_and_code(read: Callable[[str], Walk]) -> None:
    """In the order in which they stand, with ports and paths of the reader's own."""
    served = "mkdir -p /run/a\nmimo-tokenizer serve --model org/name --device cuda:3 \\\n    --address unix:///run/a/s"
    called = "mimo-tokenizer encode speech.wav codes.npz --address unix:///run/a/s\nmimo-tokenizer info --address $A"
    code = "import numpy as np\nassert np.load('codes.npz')['codes'].shape[0] == 20"
    text = (
        fence("install --directory --owner x --group y --mode 2750 /run/b\nopenssl rand -hex 32 > tokens")
        + fence(UNIT, "ini")
        + fence(f"{served} --metrics-address 127.0.0.1:9100 &\nexport MIMO_AUDIO_TOKENIZER_ADDRESS=unix:///run/a/s")
        + fence(called.replace("$A", "unix:///run/a/s"), "bash")
        + "Also `decode codes.npz speech.flac` and `make test`, by `mimo-tokenizer serve` and `info`.\n\n"
        + fence("curl http://localhost:9100/metrics | grep -q mimo_tokenizer_ready")
        + fence(code, "python")
    )
    reader = read(text)
    assert (reader.work.parent / "run/b").stat().st_mode & 0o7777 == 0o2750
    assert {"codes.npz", "speech.wav", "speech.flac", "tokens"} <= {path.name for path in reader.work.iterdir()}


def test_the_tools_of_others(read: Callable[[str], Walk]) -> None:
    read(
        fence("docker compose --profile cpu up --detach --wait\ndocker compose logs -f tokenizer")
        + fence("docker compose exec tokenizer mimo-tokenizer info")
        + fence("docker build -f Dockerfile --target server --build-arg VARIANT=cuda -t x:1 .")
        + fence("kubectl apply -f pod.yaml\nkubectl logs engine\nkubectl create secret generic token --from-file x")
    )


def test_files_that_are_taken_for_granted(read: Callable[[str], Walk]) -> None:
    """Certificates that one authority has signed, and the same token wherever one is named."""
    code = "dict(tls_cert='/a/cert.pem', tls_key='/a/key.pem', tls_ca='ca.pem', token_file='/b/token')"
    export = "export MIMO_AUDIO_TOKENIZER_METRICS_ADDRESS=127.0.0.1:9100 MIMO_AUDIO_TOKENIZER_MODEL=/models/x"
    reader = read(fence(code, "python") + fence(export))
    context = ssl.create_default_context(cafile=reader.work / "ca.pem")
    root = reader.work.parent
    context.load_cert_chain(root / "a/cert.pem", root / "a/key.pem")
    assert "token" in (root / "b/token").read_text()
    assert reader.variables["MIMO_AUDIO_TOKENIZER_MODEL"] == f"{root}/models/x"


def test_words_that_are_no_commands(tmp_path: Path) -> None:
    (tmp_path / "doc.md").write_text("`info`, `mimo-tokenizer bench`, `--log-level info`, `make`, `docker`, `x y`\n")
    commands = Document(tmp_path / "doc.md", tmp_path).commands()
    assert [rule_for(command) for command in commands] == [None] * 6


def test_anchors(tmp_path: Path) -> None:
    (tmp_path / "doc.md").write_text("# How *exact*, `--x` is\n\n## Twice\n\n## Twice\n")
    assert Document(tmp_path / "doc.md", tmp_path).anchors == {"how-exact---x-is", "twice", "twice-1"}
