"""Models from a hub: the real huggingface_hub against a small hub over real HTTP.

huggingface_hub reads its environment when it is imported, so it runs in a process of its own. One
of these serves most tests, each of which has a repository of its own.
"""

import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from services.hub_id import HubModel, parse
from services.model_folder import weights_id
from tests.support.fake_hub import FakeHub, fake_hub

TINY: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "data" / "tiny_gguf.py"))
ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_a_secret_that_nobody_sees"

CHILD = """
import json, os, sys
from pathlib import Path
from huggingface_hub import constants
from services.fetch import fetch, pinned
from services.model_cache import FetchError

constants.DOWNLOAD_CHUNK_SIZE = 10_000  # what has come is kept in steps of so much
for line in sys.stdin:
    call, said = json.loads(line), []
    os.environ.update(HF_TOKEN=call["token"])
    answer = {"said": said}
    try:
        if call["pin"]:
            answer["pinned"] = pinned(call["model"], report=said.append)
        else:
            folder = fetch(call["model"], report=said.append, weights=call["weights"])
            answer["folder"] = str(folder)
    except FetchError as error:
        answer["error"] = str(error)
    print(json.dumps(answer), flush=True)
"""


@dataclass
class Client:
    """A process that fetches what it is told to."""

    process: subprocess.Popen[str]
    home: Path

    def call(self, model: str, token: str, pin: bool, weights: bool) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        call = {"model": model, "token": token, "pin": pin, "weights": weights}
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def fetch(self, model: str, token: str = "", weights: bool = True) -> tuple[Path, str]:
        """The folder, and what was said."""
        answer = self.call(model, token, False, weights)
        assert "folder" in answer, answer
        return Path(answer["folder"]), "\n".join(answer["said"])

    def error(self, model: str, token: str = "") -> str:
        answer = self.call(model, token, False, True)
        assert "error" in answer, answer
        return str(answer["error"])

    def pinned(self, model: str) -> str:
        return str(self.call(model, "", True, True)["pinned"])

    def repo_folder(self, repo: str) -> Path:
        return self.home / "hf" / "hub" / f"models--{repo.replace('/', '--')}"


def environment(home: Path, endpoint: str, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    ours = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "XDG_CACHE_HOME": str(home)}
    return kept | ours | {"PYTHONPATH": str(ROOT)} | more


def start_client(home: Path, endpoint: str, **more: str) -> Client:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(home, endpoint, **more),
    )
    return Client(process, home)


def stop(client: Client) -> None:
    with client.process as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=30) == 0


@pytest.fixture(scope="module")
def running_hub() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        yield hub


@pytest.fixture
def hub(running_hub: FakeHub) -> FakeHub:
    """The hub, with nothing wrong and nothing asked yet."""
    running_hub.asked.clear()
    running_hub.out_of_order = False
    running_hub.cuts.clear()
    running_hub.damaged.clear()
    return running_hub


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, running_hub: FakeHub) -> Iterator[Client]:
    client = start_client(tmp_path_factory.mktemp("home"), running_hub.url)
    yield client
    stop(client)


@pytest.fixture
def start() -> Iterator[Callable[..., Client]]:
    """Starts clients, and stops them at the end."""
    clients: list[Client] = []

    def start(*args: Any, **kwargs: Any) -> Client:
        clients.append(start_client(*args, **kwargs))
        return clients[-1]

    yield start
    for client in clients:
        stop(client)


@pytest.fixture
def repo(request: pytest.FixtureRequest) -> str:
    """A name that no other test has."""
    return "org/" + re.sub(r"\W+", "-", request.node.name).strip("-")


def weights(seed: int = 0, name: str = "w", rows: int = 50) -> bytes:
    values = np.random.default_rng(seed).standard_normal((rows, 1000), dtype=np.float32)
    return save({name: values})


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 9,
    "max_position_embeddings": 64,
}
SMALL = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b'{"t": 1}',
    "tokenizer_config.json": b'{"a": 1}',
    "generation_config.json": b'{"b": 1}',
    "special_tokens_map.json": b'{"c": 1}',
    "chat_template.jinja": b"{{ messages }}",
}
UNWANTED = {
    "README.md": b"# a model",
    "pytorch_model.bin": b"pickled",
    "onnx/model.onnx": b"onnx",
    "original/consolidated.safetensors": b"as trained",
    "consolidated.safetensors": b"once more",
    "model-q4_0.gguf": b"GGUF",
    "vocab.json": b"{}",
}
MODEL = {**SMALL, "model.safetensors": weights()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen2.5-0.5B", HubModel("Qwen/Qwen2.5-0.5B")),
        ("a/b@refs/pr/4", HubModel("a/b", revision="refs/pr/4")),
        ("a/b:c.gguf", HubModel("a/b", "c.gguf")),
        ("a/b/c.gguf", HubModel("a/b", "c.gguf")),
        ("a/b/c/d.gguf@v1", HubModel("a/b", "c/d.gguf", "v1")),
        ("a/b:Q4_K_M@v1", HubModel("a/b", "Q4_K_M", "v1")),
        *((text, None) for text in ("a", "a/b.gguf", "a/b/c", "./a/b", "/a/b", "~/a", "../a", "")),
        *((text, None) for text in ("a/b@", "a/b:", "a/b@v1@v2", "a b/c", "a/.b", "https://a/b")),
    ],
)
def test_names(text: str, expected: HubModel | None) -> None:
    model = parse(text)
    assert model == expected
    assert model is None or parse(str(model)) == model


# --- fetching -------------------------------------------------------------------------------------


def test_only_what_is_needed_and_only_once(hub: FakeHub, client: Client, repo: str) -> None:
    large = weights(rows=300)
    commit = hub.add(repo, MODEL | UNWANTED | {"model.safetensors": large}).branches["main"]
    folder, said = client.fetch(repo)
    assert folder == client.repo_folder(repo) / "snapshots" / commit
    assert names(folder) == sorted(MODEL)
    assert all((folder / name).read_bytes() == data for name, data in SMALL.items())
    assert (folder / "model.safetensors").read_bytes() == large
    assert hub.content(repo) == sorted(MODEL)
    assert f"{repo}: main is commit {commit}" in said
    assert f"downloading model.safetensors of {repo} (1.2 MB)" in said
    assert "(100 %)" in said
    assert "hashes as expected" in said
    again, said = client.fetch(repo)
    assert again == folder
    assert "downloading" not in said
    assert [(asked.method, asked.path) for asked in hub.asked] == [
        ("GET", f"/api/models/{repo}/revision/main")
    ]


def test_a_pinned_model_that_is_here_asks_nothing(hub: FakeHub, client: Client, repo: str) -> None:
    """So every worker of a deployment reads one commit, whatever the branch is meanwhile."""
    first = hub.add(repo, MODEL).branches["main"]
    model = client.pinned(repo)
    assert model == f"{repo}@{first}"
    folder, _ = client.fetch(model)
    hub.repos[repo].commit(MODEL | {"model.safetensors": weights(1)})
    hub.asked.clear()
    assert client.fetch(model)[0] == folder
    assert not hub.asked
    moved, _ = client.fetch(repo)
    assert moved != folder
    assert hub.content(repo) == ["model.safetensors"]  # what is the same is not sent again
    assert weights_id(moved) != weights_id(folder)
    shutil.rmtree(client.repo_folder(repo))  # as on another node
    assert client.fetch(model)[0] == folder
    assert (folder / "model.safetensors").read_bytes() == MODEL["model.safetensors"]


def test_shards_are_those_of_the_index(hub: FakeHub, client: Client, repo: str) -> None:
    shards = {f"model-0000{i}-of-00002.safetensors": weights(i, f"w{i}") for i in (1, 2)}
    index = {"weight_map": {"w1": min(shards), "w2": max(shards)}}
    name = "model.safetensors.index.json"
    hub.add(repo, SMALL | shards | {name: json.dumps(index).encode()} | UNWANTED)
    folder, _ = client.fetch(repo)
    assert names(folder) == sorted([*SMALL, *shards, name])
    local = client.fetch(str(folder.resolve()))[0]  # it is a model's folder like others
    assert weights_id(local) == weights_id(folder)
    del hub.repos[repo].commits[folder.name][max(shards)]
    shutil.rmtree(client.home / "baton" / "hub")
    assert f"{max(shards)} is missing, although {name} names it" in client.error(repo)


def test_weights_are_left_out_where_nobody_needs_them(
    hub: FakeHub, client: Client, repo: str
) -> None:
    hub.add(repo, MODEL)
    folder, _ = client.fetch(repo, weights=False)
    assert names(folder) == sorted(SMALL)
    client.fetch(repo)
    assert names(folder) == sorted(MODEL)


@pytest.mark.parametrize("form", ["{0}:sub/tiny-Q8_0.gguf", "{0}/sub/tiny-Q8_0.gguf", "{0}:q8_0"])
def test_a_gguf_in_a_repository(
    hub: FakeHub, client: Client, repo: str, form: str, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    TINY["write"](path, TINY["random_weights"](seed=1))
    hub.add(repo, {"sub/tiny-Q8_0.gguf": path.read_bytes(), "tiny-Q4_0.gguf": b"GGUF"})
    folder, said = client.fetch(form.format(repo))
    assert folder.name.startswith("tiny-Q8_0-")
    assert "model.safetensors" in names(folder)
    again, said = client.fetch(form.format(repo))
    assert again == folder
    assert "converting" not in said


def test_all_parts_of_a_split_gguf_come(hub: FakeHub, client: Client, repo: str) -> None:
    parts = {f"q/m-Q8_0-0000{i}-of-00002.gguf": b"no GGUF %d" % i for i in (1, 2)}
    hub.add(repo, parts | {"m-Q4_0.gguf": b"another"})
    assert "m-Q8_0-00001-of-00002.gguf is not a complete GGUF" in client.error(f"{repo}:Q8_0")
    assert hub.content(repo) == [name.removeprefix("q/") for name in parts]
    del hub.repos[repo].commits[hub.repos[repo].branches["main"]][max(parts)]
    shutil.rmtree(client.home / "baton" / "hub")
    error = client.error(f"{repo}:{min(parts)}")
    assert "the model is split, and lacks m-Q8_0-00002-of-00002.gguf" in error


# --- without the hub ------------------------------------------------------------------------------


def test_a_hub_out_of_order_leaves_the_cache(hub: FakeHub, client: Client, repo: str) -> None:
    commit = hub.add(repo, MODEL).branches["main"]
    folder, _ = client.fetch(repo)
    hub.repos[repo].commit(MODEL | {"config.json": b'{"new": 1}'})
    hub.out_of_order = True
    again, said = client.fetch(repo)
    assert again == folder
    assert f"the hub at {hub.url} is out of order (HTTP 503): {repo} as it is cached" in said
    assert f"main was commit {commit}" in said
    error = client.error("org/never-seen")
    assert "org/never-seen@main is neither here nor in the cache" in error
    assert "HTTP 503" in error


def test_offline_by_choice_and_by_force(
    hub: FakeHub, client: Client, repo: str, start: Callable[..., Client]
) -> None:
    hub.add(repo, MODEL)
    folder, _ = client.fetch(repo)
    hub.add(f"{repo}-half", MODEL)
    client.fetch(f"{repo}-half", weights=False)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}"
    hub.asked.clear()
    offline = start(client.home, hub.url, HF_HUB_OFFLINE="1")
    alone = start(client.home, nobody)
    for without, reason in (
        (offline, "HF_HUB_OFFLINE is set, so the hub is not asked"),
        (alone, f"the hub at {nobody} cannot be reached"),
    ):
        again, said = without.fetch(repo)
        assert again == folder
        assert reason in said
        error = without.error("org/never-seen")
        assert reason in error
        assert "`baton fetch org/never-seen@main`, and copy the cache" in error
    error = offline.error(f"{repo}-half")
    assert "HF_HUB_OFFLINE is set" in error
    assert f"model.safetensors of {repo}-half@" in error
    assert not hub.asked
    # a snapshot that another program has left, of which we have no record
    shutil.rmtree(client.home / "baton" / "hub")
    assert offline.fetch(repo)[0] == folder
    assert "the cache has only a part of it" in offline.error(f"{repo}-half")


# --- what goes wrong ------------------------------------------------------------------------------


def test_an_interrupted_download_goes_on_at_its_byte(
    hub: FakeHub, client: Client, repo: str
) -> None:
    hub.add(repo, MODEL)
    hub.cuts["model.safetensors"] = [100_000]
    folder, _ = client.fetch(repo)
    assert (folder / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    starts = [a.first_byte for a in hub.asked if a.method == "GET" and a.path.startswith("/cdn/")]
    assert len(starts) == 2
    assert 0 < starts[1] <= 100_000


def test_complete_files_survive_an_error(hub: FakeHub, client: Client, repo: str) -> None:
    hub.add(repo, MODEL)
    hub.damaged.add("model.safetensors")
    error = client.error(repo)
    assert re.search(r"model\.safetensors is damaged: its hash is \w+, the hub says \w+", error)
    assert "it was removed, run the command again" in error
    assert "model.safetensors" in hub.content(repo)
    hub.damaged.clear()
    client.fetch(repo)
    assert hub.content(repo) == ["model.safetensors"]


def test_a_file_damaged_later_is_found(hub: FakeHub, client: Client, repo: str) -> None:
    hub.add(repo, MODEL)
    folder, _ = client.fetch(repo)
    path = folder / "tokenizer.json"
    path.resolve().write_bytes(b'{"t": 2}')
    assert f"{path} is damaged" in client.error(repo)
    client.fetch(repo)
    assert path.read_bytes() == MODEL["tokenizer.json"]


def test_gated(hub: FakeHub, client: Client, repo: str) -> None:
    hub.add(repo, MODEL).readers = {TOKEN}
    assert f"accept its terms at {hub.url}/{repo}, then set HF_TOKEN" in client.error(repo)
    error = client.error(repo, token="hf_of_somebody_else")
    assert "the account of the token (HF_TOKEN) has no access" in error
    assert "hf_of" not in error
    hub.asked.clear()
    _, said = client.fetch(repo, token=TOKEN)
    assert TOKEN not in said
    sent = {asked.path.split("/")[1]: asked.token for asked in hub.asked}
    assert sent == {"api": TOKEN, "org": TOKEN, "cdn": ""}  # and it goes to no other host


Files = Mapping[str, bytes]


def without(*left_out: str, **more: bytes) -> Files:
    return {name: data for name, data in MODEL.items() if name not in left_out} | more


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            without("model.safetensors") | {"pytorch_model.bin": b"p"},
            r"no \*\.safetensors, but pytorch_model\.bin; Baton reads safetensors and GGUF only",
        ),
        (
            without("tokenizer.json") | {"tokenizer.model": b"s"},
            r"no tokenizer\.json \(only tokenizer\.model\).*AutoTokenizer.*save_pretrained",
        ),
        (without("config.json"), r"no config\.json"),
        ({"a-Q4_0.gguf": b"G"}, r"GGUF files only: choose one of org/[\w-]+:a-Q4_0\.gguf"),
        (
            {"adapter_config.json": b"{}", "adapter_model.safetensors": b"a"},
            "it is an adapter",
        ),
    ],
    ids=["pickled", "sentencepiece", "no-config", "gguf", "adapter"],
)
def test_what_is_no_model_is_refused_before_it_is_downloaded(
    hub: FakeHub, client: Client, repo: str, files: Files, reason: str
) -> None:
    hub.add(repo, files)
    assert re.search(rf"{repo}@\w+: it .*{reason}|{reason}", client.error(repo))
    assert not hub.content(repo)


def test_an_unknown_architecture_is_refused_before_its_weights_come(
    hub: FakeHub, client: Client, repo: str
) -> None:
    hub.add(repo, MODEL | {"config.json": b'{"architectures": ["MambaForCausalLM"]}'})
    error = client.error(repo)
    assert "not supported: architecture MambaForCausalLM; supported: LlamaForCausalLM" in error
    assert hub.content(repo) == sorted(SMALL)


def test_wrong_names(hub: FakeHub, client: Client, repo: str) -> None:
    hub.add(repo, {**MODEL, "a-Q4_0.gguf": b"G", "b-Q4_0.gguf": b"G"})
    error = client.error("org/unknown")
    assert "unknown model 'org/unknown': there is no such folder here" in error
    assert "HF_TOKEN" in error
    assert f"{repo} has no revision 'v9'" in client.error(f"{repo}@v9")
    error = client.error(f"{repo}:Q8_0")
    assert f"no GGUF files are called 'Q8_0': choose one of {repo}:a-Q4_0.gguf, {repo}:b" in error
    assert "2 GGUF files are called 'Q4_0'" in client.error(f"{repo}:Q4_0")


def test_a_full_disk_is_noticed_before(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from services import hub as ours
    from services.model_cache import FetchError

    usage: Callable[[Path], Any] = lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000)  # type: ignore[attr-defined]  # noqa: E731
    monkeypatch.setattr(ours, "hub_cache", lambda: tmp_path / "not" / "there")
    monkeypatch.setattr(shutil, "disk_usage", usage)
    ours.check_space(1000)
    with pytest.raises(FetchError, match=r"there: 2\.00 GB are to be downloaded, 1 kB are free"):
        ours.check_space(2 * 10**9)


def test_the_command(hub: FakeHub, repo: str, tmp_path: Path) -> None:
    hub.add(repo, MODEL).readers = {TOKEN}
    command = [sys.executable, "-m", "services.cli", "fetch", repo]
    result = subprocess.run(
        command,
        env=environment(tmp_path, hub.url, HF_TOKEN=TOKEN),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    folder = Path(result.stdout.splitlines()[-1])
    assert names(folder) == sorted(MODEL)
    assert TOKEN not in result.stdout + result.stderr
    assert not result.stderr
