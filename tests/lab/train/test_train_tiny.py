"""The training model is GPT-OSS, its MXFP4 is the library's, and a run can be taken up again."""

import json

import numpy as np
import pytest
import torch

from lab.train import train_tiny
from lab.train.train_tiny import (
    DOMAIN_SHARES,
    Corpus,
    Recipe,
    load_state,
    make_optimizer,
    save_state,
    train,
    write_checkpoint,
)
from lab.train.train_tiny_model import (
    LibraryMoE,
    TinyConfig,
    TinyModel,
    fake_quantize,
)
from neuron_moe.quantize import decode_mxfp4, encode_mxfp4

SMALL = TinyConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=32,
    num_layers=2,
    num_experts=8,
    top_k=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_size=16,
    sliding_window=8,
    max_length=64,
)
SHORT = Recipe(steps=6, batch=8, length=24, warmup_steps=2, quantised_share=0.5)


@pytest.fixture
def corpus(tmp_path):
    """Write a corpus in which every token is the one before plus the domain's own stride."""
    held_out = {}
    for stride, domain in enumerate(DOMAIN_SHARES, start=1):
        tokens = (3 + np.arange(400) * stride % 93).astype(np.uint16)
        np.save(tmp_path / f"tokens_{domain}.npy", tokens)
        np.save(tmp_path / f"heldout_{domain}.npy", tokens[:100])
        np.save(tmp_path / f"starts_{domain}.npy", np.array([0, 200]))
        held_out[domain] = {"bytes": 300, "tokens": 100}
    (tmp_path / "corpus.json").write_text(json.dumps({"held_out": held_out}))
    return tmp_path


def lively_model(config=SMALL, dtype=torch.float32):
    """Return a model whose every weight is random and exact in bf16."""
    torch.manual_seed(1)
    model = TinyModel(config, dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_((torch.randn_like(weight) * 0.3).bfloat16())
    return model


def test_exported_weights_give_transformers_logits(tmp_path):
    from transformers import GptOssForCausalLM

    model = lively_model().eval()
    write_checkpoint(model, tmp_path)
    reference = GptOssForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(SMALL.vocab_size, (3, 40))
    with torch.no_grad():
        expected, logits = reference(tokens).logits, model(tokens)
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("scale", [1.0, 1e-6, 3e4])
def test_fake_quantisation_is_encode_and_decode(scale):
    weight_EIO = torch.randn(3, 64, 40) * scale * torch.logspace(-2, 2, 40)
    weight_EIO[0, :32, 0] = 0
    weight_EIO[1, :5, 0] = torch.tensor([0.25, 0.75, 2.5, 3.5, 5.0]) * scale  # ties
    groups_last = weight_EIO.bfloat16().transpose(1, 2).contiguous()
    expected = decode_mxfp4(*encode_mxfp4(groups_last), dtype=torch.float32).transpose(1, 2)
    torch.testing.assert_close(fake_quantize(weight_EIO), expected, rtol=1e-6, atol=0)


def test_fake_quantisation_passes_the_gradient_on():
    weight = torch.randn(1, 32, 4, requires_grad=True)
    fake_quantize(weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_balance_steers_an_overloaded_router_back():
    model = lively_model(dtype=torch.bfloat16).train()
    moe = model.moes()[0]
    moe.router.bias.data[0] = 5.0  # every token wants expert 0
    hidden = torch.randn(512, SMALL.hidden_size, dtype=torch.bfloat16) * 0.2
    moe(hidden)
    before = moe.balance(0.05)
    for _ in range(120):
        moe(hidden)
        after = moe.balance(0.05)
    assert before[0] > 3.5
    assert after.max() < 1.6


def test_the_librarys_layer_is_balanced_by_its_selection_bias():
    torch.manual_seed(0)
    moe = LibraryMoE(SMALL, "torch", torch.bfloat16)
    with torch.no_grad():  # scores of two experts stand out
        moe.layer.router.linear_router.weight.normal_(std=0.02)[:2, 0] += 1.0
    hidden = torch.randn(400, SMALL.hidden_size).bfloat16()
    hidden[:, 0] = 2.0
    shares = []
    for _ in range(100):
        moe(hidden)
        shares.append(moe.balance(0.01).max())
    assert shares[0] > 3.5
    assert shares[-1] < 1.6
    moe.eval()
    plain = moe(hidden)
    moe.fake_mxfp4 = True
    assert moe.fake_mxfp4
    assert not torch.equal(moe(hidden), plain)


BACKENDS = [None, "torch"]  # the layers made for training, and the library's


@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_falls_and_the_run_is_a_function_of_its_seed(corpus, backend):
    def losses():
        model = TinyModel(SMALL, torch.float32, backend=backend)
        model.initialise(seed=3)
        recipe = Recipe(steps=30, batch=8, length=24, warmup_steps=2, seed=3)
        data = Corpus(corpus, torch.device("cpu"))
        records = train(model, make_optimizer(model, recipe), data, recipe)
        return [record["loss"].item() for record in records]

    first = losses()
    assert first[-1] < first[0] - 0.5
    assert losses() == first


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resumed_run_ends_where_the_unbroken_one_does(corpus, tmp_path, backend):
    data = Corpus(corpus, torch.device("cpu"))

    def fresh():
        model = TinyModel(SMALL, torch.float32, dropout=SHORT.dropout, backend=backend)
        model.initialise(SHORT.seed)
        return model, make_optimizer(model, SHORT)

    unbroken, optimizer = fresh()
    for _ in train(unbroken, optimizer, data, SHORT):
        pass
    broken, optimizer = fresh()
    for _ in train(broken, optimizer, data, SHORT, last_step=2):
        pass
    save_state(tmp_path / "state.pt", broken, optimizer, 2)
    resumed, optimizer = fresh()
    step = load_state(tmp_path / "state.pt", resumed, optimizer)
    for _ in train(resumed, optimizer, data, SHORT, first_step=step):
        pass
    for name, weight in unbroken.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_command_writes_a_checkpoint_and_its_losses(corpus, tmp_path, capsys, backend):
    config = {name: getattr(SMALL, name) for name in SMALL.__slots__}
    recipe = {"steps": 4, "batch": 8, "length": 24, "warmup_steps": 2}
    out = tmp_path / "run"
    arguments = ["--corpus", str(corpus), "--out", str(out), "--device", "cpu"]
    arguments += ["--recipe", json.dumps(recipe), "--config", json.dumps(config)]
    arguments += ["--picture", str(out / "run.png")]
    arguments += [] if backend is None else ["--backend", backend]
    assert train_tiny.main(arguments) == 0
    assert "held out, " in capsys.readouterr().out
    final = json.loads((out / "train.json").read_text())
    assert final["kind"] == "measured"
    assert set(final["held_out_bits_per_byte"]["mxfp4"]) == {*DOMAIN_SHARES, "mean"}
    assert (out / "run.png").stat().st_size > 10_000
    assert (out / "model.safetensors.index.json").exists() == (backend is None)


def test_an_unknown_recipe_field_is_refused():
    with pytest.raises(ValueError, match="--recipe: stpes=4: must be one of steps, batch"):
        train_tiny.main(["--recipe", '{"stpes": 4}'])


def test_every_batch_holds_the_domains_in_proportion(corpus):
    counts = train_tiny._apportion(64)
    assert sum(counts.values()) == 64
    assert all(abs(counts[domain] - 64 * share) < 1 for domain, share in DOMAIN_SHARES.items())
