"""The front door: `neuron_moe.load` of folders and hub ids, and what a loaded model answers."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import neuron_moe
from neuron_moe.models.generation import GenerationOptions, generate
from neuron_moe.models.language_model import LanguageModel
from neuron_moe.models.loader import load_model, parse_config
from neuron_moe.models.shipped import TINY_NAME, checkpoint_folder, find_checkpoint
from neuron_moe.tools import cli

PROMPT = "1 And it came to pass"
HUB_ID = "someone/A-Tiny.Model"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return neuron_moe.load(TINY_NAME, dtype=torch.float32)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache of its own, empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def fill_cache(cache: Path, name: str = HUB_ID) -> Path:
    """Put the shipped model, with a chat template, into a cache as a download would be there."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(checkpoint_folder(TINY_NAME), snapshot, ignore=shutil.ignore_patterns("traces"))
    (snapshot / "chat_template.jinja").write_text(TEMPLATE)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_ids_give_ids_and_text_gives_text(model: LanguageModel) -> None:
    codec = model.prompting.codec
    ids = codec.encode(PROMPT)
    bare = load_model(checkpoint_folder(TINY_NAME), dtype=torch.float32)
    ((expected,)) = generate(bare, [ids], GenerationOptions(max_new_tokens=8)).token_ids
    assert model.generate(ids, max_new_tokens=8, stop_token_ids=()) == expected
    assert model.generate(PROMPT, max_new_tokens=8, stop_token_ids=()) == codec.decode(expected)
    assert list(model.stream(ids, max_new_tokens=8, stop_token_ids=())) == expected
    pieces = list(model.stream(PROMPT, max_new_tokens=8, stop_token_ids=()))
    assert len(pieces) > 1
    assert "".join(pieces) == codec.decode(expected)


def test_several_prompts_get_what_each_gets_alone(model: LanguageModel) -> None:
    prompts = [PROMPT, "def read"]
    assert model.generate(prompts, max_new_tokens=5) == [
        model.generate(each, max_new_tokens=5) for each in prompts
    ]
    assert model.generate([[1, 2], [3]], max_new_tokens=3) == [
        model.generate([1, 2], max_new_tokens=3),
        model.generate([3], max_new_tokens=3),
    ]


def test_gradients_are_recorded_between_the_tokens_of_a_stream(model: LanguageModel) -> None:
    for _ in model.stream([1, 2], max_new_tokens=2):
        assert not torch.is_inference_mode_enabled()


def test_token_ids_may_be_a_tensor(model: LanguageModel) -> None:
    ids, asked = torch.tensor([1, 2]), {"max_new_tokens": 3}
    assert model.generate(ids, **asked) == model.generate([1, 2], **asked)  # type: ignore[call-overload]
    assert list(model.stream(ids, **asked)) == model.generate([1, 2], **asked)  # type: ignore[call-overload]


def test_bad_prompts_are_refused_at_once(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="holds token 100000: must be below vocab_size"):
        model.stream([100000])
    with pytest.raises(ValueError, match="an empty prompt"):
        model.generate([], max_new_tokens=2)
    with pytest.raises(ValueError, match=r"prompt=1\.5: must be a text, a list of token ids"):
        model.generate([1.5])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"max_tokens.*Did you mean 'max_new_tokens'"):
        model.generate([1], max_tokens=2)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="has no chat template"):
        model.chat("Hello")


def test_explain_says_what_the_command_says(
    model: LanguageModel, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = str(model.explain("decode", 8))
    options = ["--phase", "decode", "--tokens", "8", "--backend", "torch"]
    assert cli.main(["explain", "--model", TINY_NAME, *options]) == 0
    assert noted.splitlines()[0] in capsys.readouterr().out


@pytest.mark.long
def test_plan_says_what_the_command_says(
    model: LanguageModel, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(model.plan("trn2.3xlarge", prompt=512, batch=8, target="tpot"))
    options = ["--instance", "trn2.3xlarge", "--prefill-tokens", "512", "--decode-tokens", "8"]
    assert cli.main(["plan", "--model", TINY_NAME, *options, "--target", "tpot"]) == 0
    assert plan in capsys.readouterr().out


def test_an_id_is_looked_up_in_the_cache_alone(cache: Path) -> None:
    assert find_checkpoint(HUB_ID) is None
    message = f"model={HUB_ID}: there is no such folder, and .*--download.*hf download {HUB_ID}"
    with pytest.raises(FileNotFoundError, match=message):
        neuron_moe.load(HUB_ID)
    snapshot = fill_cache(cache)
    assert checkpoint_folder(HUB_ID) == snapshot
    model = neuron_moe.load(HUB_ID)
    ids = model.prompting.encode_chat("Hello", "Be brief")
    codec = model.prompting.codec
    assert ids == codec.encode("system: Be brief\nuser: Hello\n", is_template=True)
    shown: list[str] = []
    answer = model.chat("Hello", system="Be brief", max_new_tokens=4, on_text=shown.append)
    assert "".join(shown) == answer == codec.decode(model.generate(ids, max_new_tokens=4))


def test_commands_take_an_id_and_talk(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_cache(cache)
    assert cli.main(["inspect", "--model", HUB_ID]) == 0
    assert "gpt_oss" in capsys.readouterr().out
    lines = "Hello\nAgain\n\nHello\n"
    read, write = os.pipe()
    os.write(write, lines.encode())
    os.close(write)
    with os.fdopen(read) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert cli.main(["chat", "--model", HUB_ID, "--max-new-tokens", "4"]) == 0
    first, second, third = re.split(r"\n\n", capsys.readouterr().out.rstrip("\n"))
    assert first == third  # the empty line started afresh
    model = neuron_moe.load(HUB_ID)
    said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": first}]
    said += [{"role": "user", "content": "Again"}]
    assert model.chat(said, max_new_tokens=4) == second


def talk(lines: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """Return the exit status of a chat on a terminal that gives these lines."""
    stdin = io.StringIO(lines)
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", stdin)
    return cli.main(["chat", "--model", HUB_ID, "--max-new-tokens", "4", *options])


def test_a_message_that_cannot_be_answered_is_left_out_of_a_chat(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_cache(cache)
    assert talk("Hello\nAgain\n", monkeypatch) == 0
    plain = capsys.readouterr().out
    long = "a " * 200_000  # longer than the context
    assert talk(f"Hello\n{long}\n\ud800\nAgain\n", monkeypatch) == 0
    shown = capsys.readouterr()
    assert shown.out.replace("> ", "") == plain.replace("> ", "")
    assert shown.err.count("This message is left out.") == 2
    assert "exceed max_position_embeddings" in shown.err
    assert "a loose byte" in shown.err


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--temperature", "-1"], "temperature=-1.0"), (["--system", "stop"], "refuses roles")],
    ids=["options", "template"],
)
def test_what_no_message_can_change_shows_before_a_chat_loads(
    options: list[str],
    words: str,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = "{% if messages[0].content == 'stop' %}{{ nothing.there }}{% endif %}x"
    (fill_cache(cache) / "chat_template.jinja").write_text(template)
    monkeypatch.setattr("neuron_moe.tools.commands.chat.load", None)
    assert talk("Hello\n", monkeypatch, *options) == 2
    assert words in capsys.readouterr().err


class _Hub(BaseHTTPRequestHandler):
    """What of the hub's interface a download requests, over the files of a folder."""

    def __init__(self, *request: object, folder: Path) -> None:
        self.folder = folder
        super().__init__(*request)  # type: ignore[arg-type]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        where = self.path.partition("?")[0]
        name = where.rpartition("/")[2]
        path = self.folder / name
        files = [*(each.name for each in self.folder.iterdir()), "original/model.safetensors"]
        if "/tree/" in where:
            tree = [{"type": "file", "path": each, "size": 1, "oid": each} for each in files]
            body = json.dumps(tree).encode()
        elif where.startswith("/api/models"):
            siblings = [{"rfilename": each} for each in files]
            body = json.dumps({"id": HUB_ID, "sha": "1" * 40, "siblings": siblings}).encode()
        elif path.is_file():
            body = path.read_bytes()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server that stands in for the hub, and the folder of the one repository it has."""
    folder = tmp_path / "repository"
    folder.mkdir()
    source = checkpoint_folder(TINY_NAME)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    (folder / "pickle.bin").write_bytes(b"not read here")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Hub, folder=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", folder
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_download_fetches_what_is_read_and_nothing_else(
    hub: tuple[str, Path], tmp_path: Path
) -> None:
    address, repository = hub
    code = (
        "import sys; from neuron_moe.models.shipped import checkpoint_folder as find;"
        "print(find(sys.argv[1], download=True))"
    )
    settings = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", code, HUB_ID],
        env={**os.environ, **settings, "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    fetched = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert fetched == {
        path.name: path.read_bytes() for path in repository.iterdir() if path.suffix != ".bin"
    }


def test_without_a_network_a_download_ends_with_one_line(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for words in (["generate", "--prompt-ids", "1"], ["compile", "--out", "nowhere"]):
        assert cli.main([*words, "--model", HUB_ID, "--download"]) == 2
        error = capsys.readouterr().err.strip()
        assert f"model={HUB_ID}: cannot be downloaded" in error
        assert "\n" not in error


def documented(kind: str) -> str:
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    pattern = {"python": r"```python\n(.*?)```", "command": r"^    neuron-moe (.*)$"}[kind]
    (found,) = re.findall(pattern, page, flags=re.DOTALL if kind == "python" else re.MULTILINE)
    return str(found)


def test_the_page_can_be_followed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill_cache(cache, "openai/gpt-oss-20b")
    exec(compile(documented("python"), "python.md", "exec"), {"__name__": "page"})
    noted = capsys.readouterr().out
    for expected in (
        "6 layers, 6 with 32 experts",
        "decode, 8 tokens: ",
        "best for tpot: TP",
        "tp=",
    ):
        assert expected in noted


@pytest.mark.long
def test_its_command_compiles_a_model_of_the_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_cache(cache, "openai/gpt-oss-20b")
    monkeypatch.chdir(tmp_path)
    assert cli.main(documented("command").split()) == 0
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["weights"]["files"] > 0


OTHERS = {
    "dense": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8},
        r"model_type='llama' \(LlamaForCausalLM\): a dense model",
    ),
    "dense-one-expert": (
        {"model_type": "jamba", "vocab_size": 8, "num_experts": 1},
        "a dense model",
    ),
    "vision": (
        {"model_type": "siglip_vision_model", "patch_size": 14},
        "'siglip_vision_model': has no part that reads text",
    ),
    "unknown": (
        {"model_type": "jamba", "vocab_size": 8, "num_experts": 16},
        "'jamba': a Mixture-of-Experts family that no file in models/ reads, and others are not",
    ),
    "unknown-inside": (
        {"model_type": "glm4v_moe", "text_config": {"vocab_size": 8, "n_routed_experts": 128}},
        "'glm4v_moe': a Mixture-of-Experts family",
    ),
    "nothing": ({"vocab_size": 8}, "model_type=None: says which family"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_no_file_reads_is_told_what_it_is(case: str) -> None:
    config, message = OTHERS[case]
    with pytest.raises(ValueError, match=f"^here: .*{message}.*must be one of [0-9]+ such as"):
        parse_config(config, "here")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.Q4_K_M.gguf", r"\*.gguf is llama.cpp's format, which is not read"),
        ("adapter_config.json", "an adapter .LoRA.: merge it"),
        ("params.json", "the form of the model's makers"),
        ("readme.md", "Check the path"),
    ],
)
def test_a_folder_without_config_is_told_what_it_holds(
    name: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match=f"config.json: must exist .*{message}"):
        neuron_moe.load(tmp_path)


def test_a_gguf_file_is_told_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    with pytest.raises(FileNotFoundError, match=r"a GGUF file of llama\.cpp, which"):
        neuron_moe.load(path)
    with pytest.raises(ValueError, match=r"model=3: must be a folder or an id"):
        neuron_moe.load(3)
    assert cli.main(["inspect", "--model", str(path)]) == 2
    assert "a GGUF file of llama.cpp" in capsys.readouterr().err


def test_commands_tell_a_dense_model_before_its_tokenizer_is_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OTHERS["dense"][0]))
    for command in (["generate", "--prompt", "Hello"], ["chat"]):
        assert cli.main([*command, "--model", str(tmp_path)]) == 2
        assert "a dense model" in capsys.readouterr().err


def test_the_package_stays_light_until_a_model_is_loaded() -> None:
    code = (
        "import sys, neuron_moe; assert 'torch' not in sys.modules;"
        f"m = neuron_moe.load('{TINY_NAME}');"
        "print(m.generate([1, 2, 3], max_new_tokens=8))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.fullmatch(r"\[\d+(, \d+){7}\]\n", done.stdout)
