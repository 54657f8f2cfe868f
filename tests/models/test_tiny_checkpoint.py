"""The shipped model loads here and in transformers, writes its domains, and loads them unevenly."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import neuron_moe.models
from lab.routing.analysis import padding_rows, skew
from neuron_moe.checkpoint import open_checkpoint
from neuron_moe.models.expert_load import moe_layers
from neuron_moe.models.loader import load_model
from neuron_moe.models.routing_trace import RoutingTrace, record_routing
from neuron_moe.models.shipped import shipped_checkpoint
from neuron_moe.models.text import TextCodec
from neuron_moe.quantize import E5M2, mxfp4_exponent_spread
from tests.rows import thinned

FOLDER = Path(neuron_moe.models.__file__).parent / "tiny_gpt_oss"
DOMAINS = ("scripture", "novel", "dictionary", "manual", "code")
MIB = 2**20
OPENINGS = {
    "scripture": "1 And it came to pass",
    "novel": "CHAPTER XII\n\nShe was",
    "dictionary": "thunder, n.",
    "manual": "NAME\n     usb_",
    "code": "import os\n",
}
# What hardly occurs outside of its domain.
MARKS = {
    "scripture": ("the LORD", " unto ", " thou ", " thee", "shalt", "\n2 ", " hath ", "And he "),
    "novel": (" Mr. ", " Mrs. ", " Miss ", "Elizabeth", "Emma", " herself", " feelings", " could "),
    "dictionary": (", n. ", ", v. ", ", adj. ", "Also:", '; "', " genus "),
    "manual": ("SYNOPSIS", "DESCRIPTION", "#include", " device", "driver", "\n     "),
    "code": ("import ", "def ", "class ", "self.", "return ", '"""'),
}


@pytest.fixture(scope="module")
def model():
    return load_model(FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def reference():
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return loaded.float().eval()


@pytest.fixture(scope="module")
def traces():
    return {domain: RoutingTrace.load(FOLDER / "traces" / f"{domain}.npz") for domain in DOMAINS}


def test_it_is_found_where_the_package_is():
    assert shipped_checkpoint() == FOLDER.resolve()


def test_it_is_small_enough_to_ship():
    sizes = [path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()]
    assert max(sizes) <= 16 * MIB
    assert sum(sizes) <= 32 * MIB


def test_all_experts_are_mxfp4():
    names = open_checkpoint(FOLDER).tensors
    blocks = [name for name in names if name.endswith("_proj_blocks")]
    assert len(blocks) == 12  # two projections of six layers
    assert not [name for name in names if name.endswith(("gate_up_proj", "down_proj"))]


def test_every_expert_weight_can_be_recoded_as_e5m2_without_loss():
    checkpoint = open_checkpoint(FOLDER)
    for name in checkpoint.tensors:
        if name.endswith("_blocks"):
            scales = checkpoint.read(name.removesuffix("_blocks") + "_scales")
            assert mxfp4_exponent_spread(checkpoint.read(name), scales, E5M2).is_lossless, name


def test_transformers_computes_the_same_logits(model, reference):
    prompts = json.loads((FOLDER / "demo_prompts.json").read_text())
    codec = TextCodec(FOLDER)
    for prompt in prompts:
        ids = torch.tensor([codec.encode(prompt)])
        with torch.inference_mode():
            ours, theirs = model(ids), reference(ids).logits
        assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("domain", thinned(DOMAINS, 3, pytest.mark.slow))
def test_transformers_generates_the_language_of_each_domain(reference, domain):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    inputs = tokenizer(OPENINGS[domain], return_tensors="pt")
    torch.manual_seed(0)
    out = reference.generate(
        **inputs, max_new_tokens=80, do_sample=True, temperature=0.6, pad_token_id=2
    )
    text = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    found = {name: sum(word in text for word in MARKS[name]) for name in DOMAINS}
    others = max(count for name, count in found.items() if name != domain)
    assert found[domain] > others, text


def test_tokenizers_of_transformers_and_ours_agree():
    from transformers import AutoTokenizer

    text = "2 And Solomon said, def f(x):\n    return x  # naïve\n"
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert TextCodec(FOLDER).encode(text) == tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_the_load_is_uneven_in_every_domain(traces):
    busiest = {domain: skew(trace.load_LE()).max() for domain, trace in traces.items()}
    assert min(busiest.values()) >= 2.0, busiest


def test_domains_prefer_different_experts(traces):
    loads = [trace.load_LE()[3] / trace.load_LE()[3].sum() for trace in traces.values()]
    apart = [np.abs(a - b).sum() / 2 for a in loads for b in loads if a is not b]
    assert max(apart) > 0.3  # share of the choices that would have to move


def test_a_shipped_trace_is_what_the_model_does(model, traces):
    samples = [json.loads(line) for line in (FOLDER / "heldout.jsonl").read_text().splitlines()]
    text = next(sample["text"] for sample in samples if sample["domain"] == "scripture")
    recorded = record_routing(model, [TextCodec(FOLDER).encode(text)])
    shipped = traces["scripture"]
    assert recorded.expert_index_LTK.shape[::2] == shipped.expert_index_LTK.shape[::2]
    ours, theirs = recorded.load_LE()[3], shipped.load_LE()[3]
    assert np.corrcoef(ours, theirs)[0, 1] > 0.6  # other verses, the same experts


def test_uneven_load_costs_more_padding_than_a_uniform_draw(model, traces):
    rows = padding_rows(moe_layers(model)[0], traces["scripture"], 1024)
    assert all(row["path"] == "blockwise" for row in rows)
    extra = [row["padding"][256]["actual"] - row["padding"][256]["expected"] for row in rows]
    assert min(extra) >= 0
    assert max(extra) > 0.2


def test_the_card_states_data_licence_recipe_and_loss():
    card = (FOLDER / "README.md").read_text()
    for heading in ("## Data", "## Licence", "## Recipe", "## Loss"):
        assert heading in card
    provenance = json.loads((FOLDER / "provenance.json").read_text())
    for package in provenance["corpus"]["packages"]:
        assert package["package"] in card
        assert package["licence"] in card
        assert (FOLDER / "licences" / f"{package['package']}.md").exists()
    loss = provenance["training"]["held_out_bits_per_byte"]
    assert f"| mean | {loss['bf16']['mean']:.4f} | {loss['mxfp4']['mean']:.4f} |" in card


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 4}, "below num_experts=4"),
        ({"sequence_starts": np.array([1], np.int32)}, "must ascend from 0"),
        ({"expert_index_LTK": np.zeros((2, 3, 1), np.int64)}, "must be uint8"),
    ],
    ids=["too-few-experts", "late-start", "wide-integers"],
)
def test_a_wrong_trace_is_refused(change, message):
    facts = {
        "expert_index_LTK": np.full((2, 3, 1), 5, np.uint8),
        "sequence_starts": np.array([0], np.int32),
        "num_experts": 8,
    }
    with pytest.raises(ValueError, match=message):
        RoutingTrace(**(facts | change))


def test_a_trace_survives_its_file(tmp_path, traces):
    traces["novel"].save(tmp_path / "t.npz")
    again = RoutingTrace.load(tmp_path / "t.npz")
    assert (again.expert_index_LTK == traces["novel"].expert_index_LTK).all()
    assert (again.sequence_starts == traces["novel"].sequence_starts).all()
