"""The choice of a reinforcement-learning algorithm: named presets whose every knob can be turned.

An algorithm is advantage estimator x loss x normalisation x clip bounds.  A config names a preset
and leaves the knobs unset (-1, or "" for a word); each that is set, in the file or on the command
line (``--config.algorithm.name=gspo --config.algorithm.clip_high=0.001``), replaces the preset's.
docs/algorithms.md has the table, docs/extending.md says how to write an advantage or a loss.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from coa_jax.bounds import MAX_INT, Between, Bounded, OneOf
from coa_jax.errors import UserError
from coa_jax.extensions import Bound, Kind, Named, bind

F = TypeVar("F", bound=Callable[..., Any])

UNSET = -1.0
"""A number that no knob can have: as the preset says."""

ADVANTAGES = Kind(
    "advantage",
    "coa_jax.advantages",
    {
        "group": "coa_jax.learn.advantages:standard_scores",
        "mean": "coa_jax.learn.advantages:less_mean",
        "leave_one_out": "coa_jax.learn.advantages:less_others",
        "batch": "coa_jax.learn.advantages:of_step",
        "batch_baseline": "coa_jax.learn.advantages:of_step_less_mean",
        "gae": "coa_jax.learn.advantages:of_critic",
        "none": "coa_jax.learn.advantages:nothing",
    },
    offers=("rewards", "lengths", "trajectories"),
    needs=("rewards", "trajectories"),
)
"""A NumPy function over the graded samples of a group; see `advantages.advantages_of`.

It may ask for their ``rewards``, float64 ``[n]``; their ``lengths``, tokens that the policy wrote,
int64 ``[n]``; and the ``trajectories`` themselves.  It gives a number for each sample, or for each
an array of a number a token.  Marks (`marked`): ``alone`` if it does not compare samples,
``whitened`` if it gives rewards, from which `advantages.gae` makes advantages that
`advantages.whiten` scales, and ``critic`` if that takes values of a critic.
"""

LOSSES = Kind(
    "loss",
    "coa_jax.losses",
    {
        "clip": "coa_jax.learn.objectives:clip",
        "sequence_clip": "coa_jax.learn.objectives:sequence_clip",
        "cispo": "coa_jax.learn.objectives:cispo",
    },
    offers=(
        *("logp", "old_logp", "log_ratio", "ratio", "advantages", "mask", "segment_ids"),
        *("entropy", "clip_low", "clip_high", "dual_clip"),
    ),
    needs=("logp", "log_ratio", "ratio"),
)
"""A pure JAX function that gives a loss for each token; see `objectives.surrogate`.

The mark ``of_sequence`` (`marked`) says that all tokens of a sequence need one advantage.
"""

NORMALISATIONS = ("token", "sequence", "constant")
NAMES = (
    "grpo",
    "dapo",
    "dr_grpo",
    "rloo",
    "gspo",
    "cispo",
    "reinforce++",
    "reinforce++_baseline",
    "ppo",
    "opd",
)
"""Names of the presets."""

LEVELS = ("token", "sequence", "geometric")
"""Of what a correction takes the ratio, see `objectives.correction`."""

Knob = Annotated[float, Between(0, 1e6, also=(-1,))]
WholeKnob = Annotated[int, Between(0, MAX_INT, also=(-1,))]


@dataclasses.dataclass(frozen=True)
class Algorithm(Bounded):
    """A preset and the knobs that differ from it; `resolve` gives one without unset knobs.

    Attributes:
        name: grpo, dapo, dr_grpo, rloo, gspo, cispo, reinforce++, reinforce++_baseline, ppo or
            opd.
        advantage: ``group`` standard scores, ``mean`` or ``leave_one_out`` baselines within a
            group, ``batch`` whitened over the step, ``batch_baseline`` the same after the group's
            mean is taken off, ``gae`` with a critic, ``none`` where only a teacher counts.
            Or ``package.module:name``, see `ADVANTAGES`.
        advantage_options: its settings.
        loss: ``clip`` by token, ``sequence_clip`` by sequence or ``cispo``; or
            ``package.module:name``, see `LOSSES`.
        loss_options: its settings, beside the bounds below, for which a loss may ask.
        normalise: ``token``, ``sequence`` or ``constant``; see `objectives.weigh`.
        learn_from: ``signal``: only groups whose rewards differ, sampling on until there are enough
            and keeping what is left over for the next step; ``all`` groups otherwise.
        clip_low: ratios below ``1 - clip_low`` stop pushing a token further down.
        clip_high: ratios above ``1 + clip_high`` stop pushing it further up.
        dual_clip: for negative advantages the loss is at most this multiple of it; 0 for none.
        negative_weight: factor on negative advantages.  Below 1 what worked counts for more: pass@1
            rises faster, at the price of variety and so of pass@k (Xiong et al. 2025, arXiv
            2504.11343; Zhu et al. 2025, arXiv 2506.01347).
        loss_length: tokens by which ``constant`` divides a sequence's sum.
        kl: estimator of the divergence from the policy that the run began with, see
            `objectives.kl_estimate`.
        kl_in: where its penalty goes, into the ``loss`` or into the ``reward`` of each token.
        kl_coef: its factor; 0 for none, which also saves the frozen copy of the parameters.
        entropy_coef: factor of the entropy bonus; 0 for none.
        opd_coef: factor of a teacher's advantages of tokens (on-policy distillation), which are
            added to those of ``advantage``; 0 for no teacher.  See `advantages.distillation`.
        old_logp: whose log-probabilities are the old ones, to which the loss takes its ratio: those
            of the ``sampler``, or those that the ``trainer`` computes before the step's first
            update (the proximal policy of decoupled PPO).
        tis_cap: bound of the importance weight trainer / sampler by which a loss is multiplied; 0
            for no weight, 1e6 for one that is hardly ever bounded.  See `objectives.correction`.
        tis_level: whose ratio the weight is: that of the ``token``, the product of its
            ``sequence``, or the ``geometric`` mean of that.
        mask_low, mask_high: ratios trainer / sampler below and above which there is no loss; 0 for
            no bound.
        mask_level: whose ratio that is, as in ``tis_level``.
        overlong_buffer: tokens before the budget ``rollout.max_tokens`` in which the reward falls;
            0 for none.  See `learn.shaping`.
        overlong_penalty: what is taken off where the budget is used up.
        gamma, lam: discount and trace decay of generalised advantage estimation.
        value_clip: how far a value may move from the old one before its loss stops; 0 for no bound.
        critic_learning_rate: the critic's optimiser is the policy's, but for this
        critic_warmup_steps: and for this.
    """

    name: Annotated[str, OneOf(*NAMES)] = "grpo"
    advantage: Annotated[str, Named(ADVANTAGES, "")] = ""
    advantage_options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    loss: Annotated[str, Named(LOSSES, "")] = ""
    loss_options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    normalise: Annotated[str, OneOf("", *NORMALISATIONS)] = ""
    learn_from: Literal["", "all", "signal"] = ""
    clip_low: Annotated[float, Between(0, 1, also=(-1,))] = UNSET
    clip_high: Knob = UNSET
    dual_clip: Annotated[float, Between(1, 1e6, above=True, also=(0, -1))] = UNSET
    negative_weight: Knob = UNSET
    loss_length: Annotated[int, Between(1, MAX_INT, also=(-1,))] = int(UNSET)
    kl: Literal["", "k1", "k2", "k3"] = ""
    kl_in: Literal["", "loss", "reward"] = ""
    kl_coef: Knob = UNSET
    entropy_coef: Knob = UNSET
    old_logp: Literal["", "sampler", "trainer"] = ""
    opd_coef: Knob = UNSET
    tis_cap: Knob = UNSET
    tis_level: Annotated[str, OneOf("", *LEVELS)] = ""
    mask_low: Knob = UNSET
    mask_high: Knob = UNSET
    mask_level: Annotated[str, OneOf("", *LEVELS)] = ""
    overlong_buffer: WholeKnob = int(UNSET)
    overlong_penalty: Knob = UNSET
    gamma: Annotated[float, Between(0, 1, also=(-1,))] = UNSET
    lam: Annotated[float, Between(0, 1, also=(-1,))] = UNSET
    value_clip: Knob = UNSET
    critic_learning_rate: Annotated[float, Between(0, 10, also=(-1,))] = UNSET
    critic_warmup_steps: WholeKnob = int(UNSET)

    def resolve(self, budget: int) -> Algorithm:
        """The algorithm with every knob set.

        Args:
            budget: tokens that a trajectory may have.

        Raises:
            UserError: there is no such preset, or the knobs do not go together.
        """
        known = presets(budget)
        knobs = {k: v for k, v in dataclasses.asdict(self).items() if v not in ("", UNSET)}
        chosen = dataclasses.replace(known[self.name], **knobs)
        if self.dual_clip > 0 and "dual_clip" not in chosen.loss_call.asks:
            _refuse(chosen, "dual_clip", f"the loss {chosen.loss} does not ask for it: give 0")
        _check(chosen, budget)
        return chosen

    @functools.cached_property
    def advantage_call(self) -> Bound:
        """The function of ``advantage``."""
        return bind(ADVANTAGES, self.advantage, self.advantage_options, "algorithm.advantage")

    @functools.cached_property
    def loss_call(self) -> Bound:
        """The function of ``loss``."""
        return bind(LOSSES, self.loss, self.loss_options, "algorithm.loss")

    @property
    def alone(self) -> bool:
        """Whether a sample has its advantage without others of its task."""
        return has_mark(self.advantage_call, "alone")

    @property
    def needs_critic(self) -> bool:
        """Whether values are learnt."""
        return has_mark(self.advantage_call, "critic")

    @property
    def whitened(self) -> bool:
        """Whether advantages of tokens are made of rewards, and scaled over the step."""
        return self.needs_critic or has_mark(self.advantage_call, "whitened")

    @property
    def of_sequence(self) -> bool:
        """Whether the loss needs one advantage for all tokens of a sequence."""
        return has_mark(self.loss_call, "of_sequence")

    @property
    def needs_reference(self) -> bool:
        """Whether the policy of the beginning has to be kept."""
        return self.kl_coef > 0

    @property
    def masks(self) -> bool:
        """Whether ratios to the sampler beyond a bound have no loss."""
        return self.mask_low > 0 or self.mask_high > 0

    def check_stale(self, why: str) -> None:
        """Refuses to learn from what older policies have sampled without a correction for it.

        Args:
            why: begins the message: the setting by which data may be old.

        Raises:
            UserError: the old log-probabilities are the trainer's, and no ratio to the sampler
                weighs or masks.
        """
        if self.old_logp == "trainer" and not self.tis_cap and not self.masks:
            raise UserError(
                f"{why} and algorithm.old_logp is 'trainer': nothing corrects for the policy that "
                "sampled; give algorithm.tis_cap=2, or algorithm.old_logp=sampler"
            )


def marked(**marks: bool) -> Callable[[F], F]:
    """Decorator that says of an advantage or a loss what `ADVANTAGES` and `LOSSES` name."""

    def mark(function: F) -> F:
        vars(function).update(marks)
        return function

    return mark


def has_mark(call: Bound, name: str) -> bool:
    """Whether a function has a mark of `marked`."""
    return bool(getattr(call.found, name, False))


def presets(budget: int) -> dict[str, Algorithm]:
    """The named algorithms, by name; sources and deviations are in docs/algorithms.md."""
    plain = Algorithm(
        advantage="group",
        loss="clip",
        normalise="token",
        learn_from="all",
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=0.0,
        negative_weight=1.0,
        loss_length=budget,
        kl="k3",
        kl_in="loss",
        kl_coef=0.0,
        entropy_coef=0.0,
        opd_coef=0.0,
        old_logp="sampler",
        tis_cap=0.0,
        tis_level="token",
        mask_low=0.0,
        mask_high=0.0,
        mask_level="token",
        overlong_buffer=0,
        overlong_penalty=1.0,
        gamma=1.0,
        lam=1.0,
        value_clip=0.5,
        critic_learning_rate=1e-5,
        critic_warmup_steps=0,
    )
    differences: dict[str, dict[str, str | float]] = {
        "grpo": {"normalise": "sequence", "kl_coef": 0.04},
        "dapo": {
            "learn_from": "signal",
            "clip_high": 0.28,
            "dual_clip": 3.0,
            "overlong_buffer": budget // 5,
        },
        "dr_grpo": {"advantage": "mean", "normalise": "constant"},
        "rloo": {"advantage": "leave_one_out", "normalise": "constant"},
        "gspo": {
            "loss": "sequence_clip",
            "normalise": "sequence",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "old_logp": "trainer",
            "tis_cap": 2.0,
            "tis_level": "geometric",
        },
        "cispo": {"loss": "cispo", "learn_from": "signal", "clip_low": 1.0, "clip_high": 4.0},
        "reinforce++": {"advantage": "batch", "kl": "k1", "kl_in": "reward", "kl_coef": 1e-3},
        "reinforce++_baseline": {"advantage": "batch_baseline", "kl": "k2", "kl_coef": 1e-3},
        "ppo": {"advantage": "gae", "dual_clip": 3.0, "kl_coef": 1e-3},
        "opd": {"advantage": "none", "opd_coef": 1.0, "old_logp": "trainer", "tis_cap": 2.0},
    }
    return {
        name: dataclasses.replace(plain, name=name, **knobs)  # type: ignore[arg-type]
        for name, knobs in differences.items()
    }


def _check(a: Algorithm, budget: int) -> None:
    """Refuses what cannot work; ``a`` has no unset knob."""
    if a.overlong_buffer > budget:
        _refuse(a, "overlong_buffer", f"the budget is {budget} tokens: give at most that")
    if a.of_sequence and (a.whitened or a.opd_coef):
        which = "a teacher" if a.opd_coef else f"advantage={a.advantage}"
        _refuse(
            a,
            "loss",
            f"a ratio of sequences needs one advantage a sequence, and {which} has one a token: "
            "give loss=clip, or " + ("opd_coef=0" if a.opd_coef else "advantage=group"),
        )
    if a.advantage == "none" and not a.opd_coef:
        _refuse(a, "advantage", "without a teacher nothing is learned: give opd_coef=1")
    if a.mask_high and a.mask_low >= a.mask_high:
        _refuse(a, "mask_low", f"mask_high is {a.mask_high:g}: give less than that")
    if a.kl_coef and a.kl_in == "reward" and not (a.alone and a.whitened):
        _refuse(
            a,
            "kl_in",
            f"advantage={a.advantage} takes one reward a sequence: give kl_in=loss, or "
            "advantage=batch or gae",
        )
    if a.kl_coef and a.kl_in == "loss" and a.kl == "k1":
        _refuse(
            a,
            "kl",
            "in a loss its gradient is that of the log-probability, whose mean is zero: give k2 "
            "or k3, or kl_in=reward",
        )
    if a.tis_cap and a.old_logp == "sampler":
        _refuse(
            a,
            "tis_cap",
            "the ratio to the sampler corrects the mismatch already: give old_logp=trainer, or "
            "tis_cap=0",
        )
    if a.needs_critic and not a.critic_learning_rate:
        _refuse(
            a, "critic_learning_rate", f"advantage={a.advantage} learns values: give more than 0"
        )


def _refuse(a: Algorithm, knob: str, advice: str) -> None:
    raise UserError(f"algorithm.{knob} is {getattr(a, knob)!r} (algorithm {a.name}); {advice}")
