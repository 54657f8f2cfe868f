"""How a model is spread over ranks: the products, and what to do when they do not fit."""

from dataclasses import dataclass, fields

from neuron_moe.errors import check_choice, check_positive_int, reject_unknown
from neuron_moe.parallel.topology import Instance, instance

STRATEGIES = ("replicate", "all_to_all")


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """How the routed experts are cut in one phase.

    Args:
        tp: ranks that split the intermediate axis of an expert.
        ep: ranks that split the experts.
        strategy: 'replicate' (gather tokens, compute local experts, reduce) or 'all_to_all'.
    """

    tp: int
    ep: int
    strategy: str = "replicate"

    def __post_init__(self) -> None:
        check_positive_int("tp", self.tp)
        check_positive_int("ep", self.ep)
        check_choice("strategy", self.strategy, STRATEGIES)

    @property
    def size(self) -> int:
        """Ranks that hold one copy of the experts."""
        return self.tp * self.ep


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How one model is spread.

    A model spans tp * ep ranks. Its experts are cut over the same ranks, by default in the same
    way; `moe_tp` and `moe_ep` cut them differently, as NxDI's moe_tp_degree and moe_ep_degree do.

    Args:
        tp: tensor parallel size.
        ep: expert parallel size; with NxDI's settings this stays 1 and moe_ep says how many.
        sp: sequence parallel: in prefill each rank holds its part of the sequence.
        dp: attention data parallel: dp groups of tp * ep / dp ranks hold different tokens, the
            ranks of a group the same ones.
        replicas: independent copies of the model.
        moe_tp: ranks that split an expert; default tp.
        moe_ep: ranks that split the experts; default ep.
        strategy: how tokens reach their experts in prefill.
        decode_moe_tp: moe_tp while decoding; default moe_tp.
        decode_moe_ep: moe_ep while decoding; default moe_ep. decode_moe_tp * decode_moe_ep may be a
            divisor of tp * ep: then several groups of ranks each hold all experts for decode.
        decode_strategy: strategy while decoding; default `strategy`.

    Raises:
        ValueError: a size is no positive int, or a product does not fit.
    """

    tp: int = 1
    ep: int = 1
    sp: bool = False
    dp: int = 1
    replicas: int = 1
    moe_tp: int | None = None
    moe_ep: int | None = None
    strategy: str = "replicate"
    decode_moe_tp: int | None = None
    decode_moe_ep: int | None = None
    decode_strategy: str | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "dp", "replicas"):
            check_positive_int(name, getattr(self, name))
        for name in ("moe_tp", "moe_ep", "decode_moe_tp", "decode_moe_ep"):
            if getattr(self, name) is not None:
                check_positive_int(name, getattr(self, name))
        check_choice("strategy", self.strategy, STRATEGIES)
        if self.decode_strategy is not None:
            check_choice("decode_strategy", self.decode_strategy, STRATEGIES)
        if not isinstance(self.sp, bool):
            raise ValueError(f"sp={self.sp!r}: must be True or False.")
        self._check_products()

    def _check_products(self) -> None:
        ranks = self.model_size
        if self.prefill.size != ranks:
            raise ValueError(
                f"moe_tp={self.prefill.tp}, moe_ep={self.prefill.ep}: the product"
                f" {self.prefill.size} must be tp * ep = {ranks}. Use {_splits(ranks)}."
            )
        if ranks % self.decode.size:
            raise ValueError(
                f"decode_moe_tp={self.decode.tp}, decode_moe_ep={self.decode.ep}: the product"
                f" {self.decode.size} must divide tp * ep = {ranks}. Use {_splits(ranks)}."
            )
        if ranks % self.dp:
            raise ValueError(
                f"dp={self.dp}: must divide tp * ep = {ranks}, the ranks of the model. Use"
                f" {_list(divisors(ranks))}."
            )
        same, held = ranks // self.dp, self.decode.size
        if same % held and held % same:
            raise ValueError(
                f"dp={self.dp}, decode_moe_tp * decode_moe_ep = {held}: the {same} ranks with the"
                f" same tokens and the {held} ranks with one copy of the experts must divide one"
                " another."
            )
        if self.sp and self.dp > 1:
            raise ValueError(
                f"sp=True, dp={self.dp}: both say which tokens a rank holds. Set sp=False; each"
                " rank can hold its own tokens with dp = tp * ep."
            )

    @classmethod
    def from_neuron_config(cls, **settings: int | bool | dict[str, int]) -> "ParallelConfig":
        """Read NxDI's names: tp_degree, moe_tp_degree, moe_ep_degree, attention_dp_degree,
        sequence_parallel_enabled and hybrid_sharding_config; others are refused.
        """
        names = {
            "tp_degree": "tp",
            "ep_degree": "ep",
            "moe_tp_degree": "moe_tp",
            "moe_ep_degree": "moe_ep",
            "attention_dp_degree": "dp",
            "sequence_parallel_enabled": "sp",
        }
        reject_unknown("NeuronConfig", settings, [*names, "hybrid_sharding_config"])
        values: dict[str, object] = {
            names[key]: value for key, value in settings.items() if key in names
        }
        hybrid = settings.get("hybrid_sharding_config") or {}
        hybrid_names = {
            "moe_cte_tp_degree": "moe_tp",
            "moe_cte_ep_degree": "moe_ep",
            "moe_tkg_tp_degree": "decode_moe_tp",
            "moe_tkg_ep_degree": "decode_moe_ep",
        }
        if not isinstance(hybrid, dict):
            raise ValueError(f"hybrid_sharding_config={hybrid!r}: must be a dict of four degrees.")
        reject_unknown("hybrid_sharding_config", hybrid, hybrid_names)
        values.update({hybrid_names[key]: value for key, value in hybrid.items()})
        return cls(**values)  # type: ignore[arg-type]

    @property
    def model_size(self) -> int:
        """Ranks of one model, tp * ep."""
        return self.tp * self.ep

    @property
    def world_size(self) -> int:
        """Ranks of all replicas."""
        return self.model_size * self.replicas

    @property
    def prefill(self) -> ExpertLayout:
        """How the experts are cut in prefill."""
        return ExpertLayout(self.moe_tp or self.tp, self.moe_ep or self.ep, self.strategy)

    @property
    def decode(self) -> ExpertLayout:
        """How the experts are cut in decode."""
        return ExpertLayout(
            self.decode_moe_tp or self.prefill.tp,
            self.decode_moe_ep or self.prefill.ep,
            self.decode_strategy or self.strategy,
        )

    @property
    def is_hybrid(self) -> bool:
        """Whether prefill and decode cut the experts differently."""
        prefill, decode = self.prefill, self.decode
        return (prefill.tp, prefill.ep) != (decode.tp, decode.ep)

    def to_dict(self) -> dict[str, object]:
        """Return the fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def check_world(self, world_size: int) -> None:
        """Raise ValueError unless exactly `world_size` ranks are needed."""
        if self.world_size == world_size:
            return
        factors = f"tensor_model_parallel_size={self.tp}, expert_model_parallel_size={self.ep}"
        if self.replicas > 1:
            factors += f", data_parallel_size={self.replicas}"
        options = _list([f"{tp} x {world_size // tp}" for tp in divisors(world_size)], "or")
        raise ValueError(
            f"{factors}: need {self.world_size} ranks, the product, but the world has {world_size}."
            f" Start {self.world_size} processes, or use TP x EP of {options}."
        )

    def check_experts(self, num_experts: int, intermediate_size: int) -> None:
        """Raise ValueError unless the layouts divide the experts and their intermediate axis."""
        for phase, layout in (("prefill", self.prefill), ("decode", self.decode)):
            if num_experts % layout.ep:
                fitting = [n for n in divisors(self.model_size) if num_experts % n == 0]
                raise ValueError(
                    f"moe_ep={layout.ep} ({phase}): must divide num_experts={num_experts}. Use"
                    f" {_list(fitting)}."
                )
            if intermediate_size % layout.tp:
                fitting = [n for n in divisors(self.model_size) if intermediate_size % n == 0]
                raise ValueError(
                    f"moe_tp={layout.tp} ({phase}): must divide"
                    f" intermediate_size={intermediate_size}. Use {_list(fitting)}, or pad the"
                    " intermediate axis."
                )

    def check_topology(self, machine: Instance | str, lnc: int = 2, nodes: int = 1) -> list[str]:
        """Check that the ranks exist on a machine and that groups suit it.

        Args:
            machine: an instance or its name, such as 'trn2.48xlarge'.
            lnc: physical cores per logical core, 1 or 2.
            nodes: instances.

        Returns:
            Advice, one sentence each; empty if there is none.

        Raises:
            ValueError: the ranks do not fit the machine; the message suggests sizes.
        """
        machine = instance(machine) if isinstance(machine, str) else machine
        cores = machine.logical_cores(lnc) * nodes
        where = f"{machine.name} at LNC{lnc}" + (f", {nodes} nodes" if nodes > 1 else "")
        if self.world_size > cores:
            raise ValueError(
                f"tp={self.tp}, ep={self.ep}, replicas={self.replicas}: need {self.world_size}"
                f" ranks, {where} has {cores} logical cores. Use {_list(divisors(cores))} ranks."
            )
        if cores % self.world_size:
            raise ValueError(
                f"tp={self.tp}, ep={self.ep}, replicas={self.replicas}: {self.world_size} ranks"
                f" must divide the {cores} logical cores of {where}, so that groups do not"
                f" straddle chips unevenly. Use {_list(divisors(cores))}."
            )
        return self._advice(machine, lnc)

    def _advice(self, machine: Instance, lnc: int) -> list[str]:
        advice = []
        per_chip = machine.logical_cores_per_chip(lnc)
        for phase, layout in (("prefill", self.prefill), ("decode", self.decode)):
            if layout.tp > per_chip and layout.tp % per_chip:
                advice.append(
                    f"{phase}: moe_tp={layout.tp} is no multiple of the {per_chip} logical cores of"
                    " a chip; its groups straddle chips."
                )
            if layout.strategy == "replicate" and layout.tp > 1 and layout.ep > 1:
                advice.append(
                    f"{phase}: one reduction over all {layout.size} ranks is used, not one each"
                    f" over {layout.tp} and {layout.ep}: mixed group sizes in one graph have failed"
                    " on Trn2."
                )
        if lnc == 1:
            advice.append("LNC1: NxD has no blockwise kernel for it; LNC2 is the tested setting.")
        return advice


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _splits(ranks: int) -> str:
    return _list([f"{tp} x {ranks // tp}" for tp in divisors(ranks)], "or")


def _list(options: list[int] | list[str], word: str = "or") -> str:
    texts = [str(option) for option in options]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {word} {texts[-1]}"
