"""The declarative map between the tensors of a checkpoint and the parameters of a module."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from neuron_moe.checkpoint.lazy import LazyTensor, stack
from neuron_moe.checkpoint.problems import Problems
from neuron_moe.checkpoint.reader import Checkpoint
from neuron_moe.checkpoint.transforms import Transform, identity, invert_in_parts
from neuron_moe.errors import check_positive_int, closest

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a map: which checkpoint tensors make which parameter, and how.

    Args:
        sources: checkpoint key, or several in the order the transform takes them. `{layer}` and the
            like stand for a number. A placeholder that the target lacks, usually `{expert}`, is
            stacked: its tensors form a new first axis before the transform.
        target: parameter name, with the same placeholders.
        transform: from sources to parameter.
        variant: name of the storage form, where several rules fill the same target.
        is_exact: stored in float32 whatever the dtype of the checkpoint, as its publishers do where
            rounding would change choices and not only shift values.
    """

    sources: str | tuple[str, ...]
    target: str
    transform: Transform = identity
    variant: str = ""
    is_exact: bool = False

    @property
    def patterns(self) -> tuple[str, ...]:
        """The sources as a tuple."""
        return (self.sources,) if isinstance(self.sources, str) else self.sources

    @property
    def stacked(self) -> tuple[str, ...]:
        """Placeholders of the sources that the target lacks."""
        return tuple(
            name for name in placeholders(self.patterns[0]) if name not in placeholders(self.target)
        )


@dataclass(frozen=True, slots=True)
class Assignment:
    """A parameter and the checkpoint tensor that fills it.

    Args:
        target: name of the parameter.
        source: what it is read from, in the full shape of the parameter.
        keys: the checkpoint keys that takes.
    """

    target: str
    source: LazyTensor
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeightMap:
    """All rules of a model.

    Args:
        rules: what fills each parameter.
        sizes: how many values each placeholder takes, from 0 up: {"layer": 24}.
        ignored: patterns of checkpoint keys that are left out on purpose.
        ignored_blocks: checkpoint keys that are left out where another key, by which they are
            listed, shows that they are what they seem; a checkpoint has all such blocks or none.

    Raises:
        ValueError: if a rule contradicts itself or the sizes.
    """

    rules: Sequence[Rule]
    sizes: Mapping[str, int] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    ignored_blocks: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            check_positive_int(f"sizes[{name!r}]", size)
        counts = Counter((rule.target, rule.variant) for rule in self.rules)
        for rule in self.rules:
            self._check_rule(rule, counts[rule.target, rule.variant])
        for pattern in (*self.ignored, *itertools.chain(*self.ignored_blocks.values())):
            self._check_placeholders(pattern)

    def resolve(self, checkpoint: Checkpoint, parameters: Iterable[str]) -> list[Assignment]:
        """Decide what fills each parameter; account for every key and every parameter.

        Args:
            checkpoint: the tensors there are.
            parameters: names of all parameters and persistent buffers to fill.

        Returns:
            One assignment for each parameter, in the order of the rules.

        Raises:
            ValueError: listing every key that is missing or extra, every parameter without a rule,
                and every tensor whose shape or dtype its transform refuses.
        """
        problems = Problems(checkpoint.path)
        wanted = set(parameters)
        candidates: dict[str, list[tuple[Rule, dict[str, int]]]] = {}
        for rule in self.rules:
            for binding in self._bindings(rule.target):
                candidates.setdefault(rule.target.format(**binding), []).append((rule, binding))
        for target in sorted(candidates.keys() - wanted):
            problems.add("rule", f"{target}: a rule fills it, but the model has no such parameter")
        for target in sorted(wanted - candidates.keys()):
            problems.add("rule", f"{target}: the model has it, but no rule fills it")

        used = set()
        assignments = []
        for target, options in candidates.items():
            rule, binding, absent = self._choose(target, options, checkpoint, problems)
            keys = self._source_keys(rule, binding)
            flat = [key for group in keys for key in group]
            used.update(flat)
            if absent:
                for key in absent:
                    problems.add("missing", f"{key} (it fills {target})")
            elif target in wanted:
                try:
                    source = _apply(rule, keys, checkpoint)
                except ValueError as error:
                    problems.add("tensor", str(error))
                else:
                    assignments.append(Assignment(target, source, tuple(flat)))
        ignored = self._ignored_keys(checkpoint, problems)
        for key in checkpoint.tensors:
            if key not in used and key not in ignored:
                problems.add("extra", self._explain_extra(key))
        problems.raise_if_any()
        return assignments

    def export(
        self, parameters: Mapping[str, Tensor], variant: str | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Run the map backward: yield checkpoint keys and tensors, one parameter at a time.

        Args:
            parameters: every parameter and persistent buffer by name.
            variant: storage form, where the map knows several.

        Raises:
            ValueError: if the variant is unknown or needed and not given, or parameters and rules
                do not match one to one.
        """
        for target, (rule, groups) in self.exports(parameters, variant).items():
            sources = invert_in_parts(rule.transform, parameters[target].detach())
            for group, source in zip(groups, sources, strict=True):
                parts = source.unbind(0) if rule.stacked else (source,)
                if len(parts) != len(group):
                    raise ValueError(
                        f"{target} {list(parameters[target].shape)}: the first axis must be "
                        f"{len(group)}, one for each {rule.stacked[0]}. Check the sizes of the map."
                    )
                yield from zip(group, parts, strict=True)

    def exports(
        self, parameters: Iterable[str], variant: str | None = None
    ) -> dict[str, tuple[Rule, list[list[str]]]]:
        """Return for each parameter its rule and the checkpoint keys of each source of the rule.

        A stacked source has a key for each number, others have one.

        Args:
            parameters: names of every parameter and persistent buffer.
            variant: storage form, where the map knows several.

        Raises:
            ValueError: as `export`.
        """
        found = {
            rule.target.format(**binding): (rule, self._source_keys(rule, binding))
            for rule in self._rules_of(variant)
            for binding in self._bindings(rule.target)
        }
        if unmatched := sorted(found.keys() ^ set(parameters)):
            raise ValueError(
                f"{unmatched[0]}: must be both a parameter and the target of a rule "
                f"({len(unmatched)} names are not). Export the model that the map was written for."
            )
        return found

    def variants(self) -> tuple[str, ...]:
        """Return the storage forms the map knows, in the order of the rules."""
        return tuple(dict.fromkeys(rule.variant for rule in self.rules if rule.variant))

    def exact_keys(self) -> set[str]:
        """Return the checkpoint keys that are stored in float32 in any case."""
        return {
            key
            for rule in self.rules
            if rule.is_exact
            for binding in self._bindings(rule.target)
            for group in self._source_keys(rule, binding)
            for key in group
        }

    def _rules_of(self, variant: str | None) -> list[Rule]:
        """Return the rules of one storage form."""
        known = self.variants()
        if variant is None and known:
            raise ValueError(
                f"variant=None: must be one of {', '.join(known)}, for the map knows several "
                f"storage forms. Pass variant={known[0]!r}."
            )
        if variant is not None and variant not in known:
            raise ValueError(
                f"variant={variant!r}: must be one of {', '.join(known) or 'none, here'}. "
                f"{closest(variant, known) if known else 'Leave it out.'}"
            )
        return [rule for rule in self.rules if rule.variant in ("", variant)]

    def _bindings(self, pattern: str) -> Iterator[dict[str, int]]:
        """Yield every assignment of numbers to the placeholders of a pattern."""
        names = placeholders(pattern)
        for numbers in itertools.product(*(range(self.sizes[name]) for name in names)):
            yield dict(zip(names, numbers, strict=True))

    def _source_keys(self, rule: Rule, binding: dict[str, int]) -> list[list[str]]:
        """Return the keys of each source; a stacked source has one for each number."""
        if not rule.stacked:
            return [[pattern.format(**binding)] for pattern in rule.patterns]
        (name,) = rule.stacked
        return [
            [pattern.format(**binding, **{name: number}) for number in range(self.sizes[name])]
            for pattern in rule.patterns
        ]

    def _ignored_keys(self, checkpoint: Checkpoint, problems: Problems) -> set[str]:
        """Return what is left out of this checkpoint."""
        shown = [mark for mark in self.ignored_blocks if mark in checkpoint.tensors]
        if shown:
            for mark in self.ignored_blocks.keys() - set(shown):
                problems.add("missing", f"{mark} (config.json declares its layer)")
        patterns = [*self.ignored, *(name for mark in shown for name in self.ignored_blocks[mark])]
        return {
            pattern.format(**binding) for pattern in patterns for binding in self._bindings(pattern)
        }

    def _choose(
        self,
        target: str,
        options: list[tuple[Rule, dict[str, int]]],
        checkpoint: Checkpoint,
        problems: Problems,
    ) -> tuple[Rule, dict[str, int], list[str]]:
        """Return the storage form the checkpoint uses for a parameter, and what it lacks of it."""
        counted = []
        for rule, binding in options:
            flat = [key for group in self._source_keys(rule, binding) for key in group]
            absent = [key for key in flat if key not in checkpoint.tensors]
            counted.append((len(flat) - len(absent), rule, binding, absent))
        started = [entry for entry in counted if entry[0]]
        if len({rule.sources for _, rule, _, _ in started}) > 1:
            names = " and ".join(repr(rule.variant) for _, rule, _, _ in started)
            problems.add("tensor", f"{target}: the checkpoint holds it twice, as {names}; keep one")
        _, rule, binding, absent = (started or counted)[0]
        return rule, binding, absent

    def _explain_extra(self, key: str) -> str:
        """Say why a key is extra: a number out of range, or no rule at all."""
        patterns = [pattern for rule in self.rules for pattern in rule.patterns]
        for mark, block in self.ignored_blocks.items():
            if any(re.fullmatch(_as_expression(pattern), key) for pattern in block):
                return f"{key} (left out only beside {mark}, which is missing)"
        for pattern in (*patterns, *self.ignored):
            names = placeholders(pattern)
            found = re.fullmatch(_as_expression(pattern), key)
            for name, number in zip(names, found.groups() if found else (), strict=False):
                if int(number) >= self.sizes[name]:
                    return f"{key} ({name} must be below {self.sizes[name]})"
        return f"{key} (no rule uses it)"

    def _check_rule(self, rule: Rule, alike: int) -> None:
        """Refuse a rule that cannot work, or one of several with its target and variant."""
        if len(rule.patterns) != rule.transform.num_sources:
            raise ValueError(
                f"rule for {rule.target}: {len(rule.patterns)} sources, but {rule.transform.name} "
                f"takes {rule.transform.num_sources}. Give it that many."
            )
        names = set(placeholders(rule.patterns[0]))
        for pattern in rule.patterns:
            self._check_placeholders(pattern)
            if set(placeholders(pattern)) != names:
                raise ValueError(
                    f"rule for {rule.target}: all sources must have the placeholders of "
                    f"{rule.patterns[0]}, but {pattern} has others. Split the rule."
                )
        if not names.issuperset(placeholders(rule.target)) or len(rule.stacked) > 1:
            raise ValueError(
                f"rule for {rule.target}: its placeholders must be those of {rule.patterns[0]}, "
                "one of which may be left out to be stacked. Correct the target."
            )
        if alike > 1:
            raise ValueError(
                f"rule for {rule.target}: {alike} rules fill it with "
                f"variant={rule.variant!r}, "
                "must be one. Give each storage form a variant of its own."
            )

    def _check_placeholders(self, pattern: str) -> None:
        """Refuse a placeholder of unknown size."""
        for name in placeholders(pattern):
            if name not in self.sizes:
                raise ValueError(
                    f"pattern {pattern}: the size of {{{name}}} must be in sizes, which has "
                    f"{sorted(self.sizes) or 'none'}. Add sizes={{{name!r}: ...}}."
                )


def placeholders(pattern: str) -> list[str]:
    """Return the names in braces, in order.

    Example:
        >>> placeholders("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight")
        ['layer', 'expert']
    """
    return _PLACEHOLDER.findall(pattern)


def _as_expression(pattern: str) -> str:
    """Return the regular expression of a pattern, whose groups are the numbers."""
    parts = [re.escape(part) for part in _PLACEHOLDER.split(pattern)[::2]]
    return r"(\d+)".join(parts)


def _apply(rule: Rule, keys: list[list[str]], checkpoint: Checkpoint) -> LazyTensor:
    """Build what fills a parameter, stacking where the rule says so."""
    sources = []
    for group in keys:
        parts = [checkpoint.lazy(key) for key in group]
        sources.append(stack(parts) if rule.stacked else parts[0])
    return rule.transform.apply(*sources)
