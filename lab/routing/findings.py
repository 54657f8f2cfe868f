"""All findings of a run of routing, as JSON, on one screen and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from lab.routing.analysis import (
    BF16_STEP,
    Pair,
    RankBalance,
    balance_of,
    margins_of,
    mean_padding,
    skew,
    strongest_pairs,
)
from lab.routing.picture import load_figure, pair_figure
from neuron_moe.models.routing_trace import RoutingTrace
from neuron_moe.tools.console import format_table
from neuron_moe.tools.pages import Items, Page, Row, Section, Table, picture_of

_PAIRS = 12
_WORTH_REPLICAS, _WORTH_PLACING = 1.1, 1.05


@dataclass(frozen=True)
class Findings:
    """What traces of one model say.

    Attributes:
        name: of the model, or of the traces.
        traces: by domain.
        padding: of each domain, rows of `padding_rows`; empty without a model.
        kernel_us: estimate of the prefill kernels by block size, for the most uneven layer of all
            tokens; empty without a model.
        tokens: of the prefill that both are about.
        ranks: of the expert-parallel group that is looked at; 0 where the experts do not divide.
        file: where other commands find the choices of all tokens.
    """

    name: str
    traces: Mapping[str, RoutingTrace]
    padding: Mapping[str, Sequence[dict[str, Any]]]
    kernel_us: Mapping[int, float]
    tokens: int
    ranks: int
    file: str

    @cached_property
    def all(self) -> RoutingTrace:
        """The tokens of all domains."""
        return RoutingTrace.joined(list(self.traces.values()))

    @cached_property
    def pairs(self) -> list[Pair]:
        """The strongest pairs over all domains."""
        return strongest_pairs(self.all, _PAIRS)

    @cached_property
    def balance(self) -> dict[str, RankBalance]:
        """Of the ranks, by domain."""
        if not self.ranks:
            return {}
        return {
            domain: balance_of(trace, self.ranks)
            for domain, trace in self.traces.items()
            if trace.num_tokens > 1
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {
            "model": self.name,
            "kind": "measured",
            "tokens": {domain: trace.num_tokens for domain, trace in self.traces.items()},
            "busiest_over_mean": {
                domain: [round(float(value), 3) for value in skew(trace.load_LE())]
                for domain, trace in self.traces.items()
            },
            "margins": {
                domain: [asdict(each) for each in margins_of(trace)]
                for domain, trace in self.traces.items()
            },
            "pairs": [asdict(pair) for pair in self.pairs],
            "prefill_tokens": self.tokens,
            "prefill_padding": {d: mean_padding(rows) for d, rows in self.padding.items()},
            "kernel_us_by_block_size": dict(self.kernel_us),
            "balance": {domain: asdict(each) for domain, each in self.balance.items()},
            "follows": self.follows(),
        }

    def follows(self) -> list[str]:
        """Say what follows for block size, placement and comparisons."""
        sentences = [self._block_size()]
        if self.balance:
            sentences.append(self._placement())
        margins = [each for trace in self.traces.values() for each in margins_of(trace)]
        if margins:
            share = sum(each.in_rounding for each in margins) / len(margins)
            sentences.append(
                f"margins: {share:.2%} of the choices are closer than bfloat16 rounds a score of 1"
                f" ({BF16_STEP:.4f}): there two correct implementations may choose differently"
            )
        return sentences

    def _block_size(self) -> str:
        tune = f"neuron-moe tune --trace {self.file}"
        if not self.kernel_us:
            return f"block size: {tune} --model M finds it, M the model that chose"
        size = min(self.kernel_us, key=lambda each: self.kernel_us[each])
        times = ", ".join(f"{us:,.0f} us with {each}" for each, us in self.kernel_us.items())
        paddings = [mean_padding(rows)[size] for rows in self.padding.values()]
        return (
            f"block size: {size} for {self.tokens:,} tokens on one rank ({times} [computed]); it"
            f" pads {min(paddings):.0%} to {max(paddings):.0%} by domain. To be sure, or for other"
            f" ranks: {tune}"
        )

    def _placement(self) -> str:
        worst = max(self.balance, key=lambda domain: self.balance[domain].before)
        found = self.balance[worst]
        if found.before / min(found.packed, found.replicated) < _WORTH_PLACING:
            advice = "placing by load gains little"
        elif found.packed / found.replicated > _WORTH_REPLICAS:
            advice = f"{self._place()} --extra-experts {found.replicas}"
        else:
            advice = self._place()
        return (
            f"EPLB on {self.ranks} ranks, {worst}: the busiest rank carries {found.before:.2f} x"
            f" the mean, {found.packed:.2f} placed by load, {found.replicated:.2f} with"
            f" {found.replicas} replicas; {advice}"
        )

    def _place(self) -> str:
        return f"neuron-moe plan --place --trace {self.file} --ranks {self.ranks}"

    def screen(self) -> str:
        """Return what fits one screen: skew, margins, pairs, and what follows."""
        lines = ["busiest expert over the mean of its layer, by domain  [measured]"]
        lines.append(format_table(self._skew_rows()))
        if any(trace.margin_LT is not None for trace in self.traces.values()):
            lines.append("\nmargin of the last chosen expert, median of the tokens  [measured]")
            lines.append(format_table(self._margin_rows()))
        strongest = ", ".join(
            f"{pair.experts[0]}+{pair.experts[1]} in layer {pair.layer} ({pair.lift:.1f} x chance)"
            for pair in self.pairs[:3]
        )
        lines.append(f"\nchosen together: {strongest or 'no pair more than by chance'}")
        return "\n".join([*lines, "", "what follows", *(f"- {each}" for each in self.follows())])

    def page(self) -> Page:
        """Return everything, for a browser."""
        loads = picture_of(load_figure(self.traces), "load of every expert by layer and domain")
        pairs = [
            picture_of(pair_figure(self.all, layer), f"layer {layer}: experts chosen together")
            for layer in sorted({pair.layer for pair in self.pairs})
        ]
        sections = [
            Section("What follows", [Items(self.follows())]),
            Section("Load", [loads, Table(self._skew_rows(), caption="busiest expert / mean")]),
        ]
        if len(margins := self._margin_rows()) > 1:
            sections.append(Section("Margins", [Table(margins, caption="median of the tokens")]))
        pair_rows = [("experts", "layer", "of the tokens", "x chance")]
        pair_rows += [
            (f"{p.experts[0]} + {p.experts[1]}", str(p.layer), f"{p.share:.1%}", f"{p.lift:.2f}")
            for p in self.pairs
        ]
        sections.append(Section("Pairs", [Table(pair_rows), Row(pairs)]))
        if self.padding:
            sections.append(Section("Padding by block size", [Table(self._padding_rows())]))
        if self.balance:
            sections.append(Section(f"On {self.ranks} ranks", [Table(self._balance_rows())]))
        remarks = (
            "load, pairs, margins and actual padding: measured on the tokens of the traces",
            "worst and uniform padding, times of kernels: computed",
        )
        return Page(f"Routing of {self.name}", self.follows()[0], sections, remarks)

    def _layers(self) -> range:
        return range(len(self.all.expert_index_LTK))

    def _skew_rows(self) -> list[list[str]]:
        rows = [["domain", "tokens", *(f"layer {layer}" for layer in self._layers())]]
        for domain, trace in self.traces.items():
            shares = [f"{share:.2f}" for share in skew(trace.load_LE())]
            rows.append([domain, str(trace.num_tokens), *shares])
        return rows

    def _margin_rows(self) -> list[list[str]]:
        rows = [["domain", *(f"layer {layer}" for layer in self._layers())]]
        for domain, trace in self.traces.items():
            if found := margins_of(trace):
                rows.append([domain, *(f"{each.median:.2f}" for each in found)])
        return rows

    def _padding_rows(self) -> list[list[str]]:
        first = next(iter(self.padding.values()))[0]["padding"]
        rows = [["block size", "worst", "uniform", *self.padding]]
        for size, padding in first.items():
            actual = [mean_padding(each)[size] for each in self.padding.values()]
            shares = [padding["worst"], padding["expected"], *actual]
            rows.append([str(size), *(f"{share:.0%}" for share in shares)])
        return rows

    def _balance_rows(self) -> list[list[str]]:
        head = ["domain", "equal runs", "placed by load", "with replicas", "ranks a token"]
        return [
            head,
            *(
                [
                    domain,
                    *(f"{value:.2f}" for value in (b.before, b.packed, b.replicated)),
                    f"{b.ranks_a_token:.1f}",
                ]
                for domain, b in self.balance.items()
            ),
        ]
